"""Fused norms, rotary embeddings and activations on CUDA, compared with the plain ops and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.attention_check import graph_seconds
from torch import Tensor

from loraplex.api.bench.models import BaseShape
from loraplex.engine.model.agreement import agree
from loraplex.kernels.gated_activation import (
    Activation,
    gated_activation,
    plain_gated_activation,
)
from loraplex.kernels.rms_norm import NormForm, plain_rms_norm, rms_norm
from loraplex.kernels.rotary import plain_rotary, rotary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (
    BaseShape(hidden_size=4_096, intermediate_size=14_336, num_heads=32, num_kv_heads=8),
    BaseShape(hidden_size=960, intermediate_size=2_560, num_heads=12, num_kv_heads=3),
)
"""An 8 B Llama's layer, and one whose sizes are no powers of two."""
CHECKED_ROWS = (1, 3, 300)
TIMED_ROWS = (1, 32, 2_048)
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class FusedOp:
    """One op with its arguments."""

    name: str
    fused: Callable[[], Tensor | tuple[Tensor, Tensor]]
    plain: Callable[[], Tensor | tuple[Tensor, Tensor]]

    def agrees(self) -> bool:
        """Whether both give the same but for a few last bits."""
        return all(map(agree, _tensors(self.fused()), _tensors(self.plain())))


def _tensors(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def fused_ops(
    shape: BaseShape, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Iterator[FusedOp]:
    """The ops of a layer of this shape, their arguments slices of a projection as in a model."""
    draw = partial(torch.randn, dtype=dtype, device=device)
    x, weight = draw(1, num_rows, shape.hidden_size), draw(shape.hidden_size)
    for form in NormForm:
        yield _norm_op(f"rms_norm {form.name.lower()}", x, weight, form)
    dim = shape.hidden_size // shape.num_heads
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    projected = draw(1, num_rows, sum(heads) * dim).split([count * dim for count in heads], -1)
    q, k, _ = (part.view(1, num_rows, -1, dim) for part in projected)
    yield _norm_op("rms_norm of heads", q, draw(dim), NormForm.ROUNDED_FIRST)
    angles = draw(1, num_rows, dim // 2).float().repeat(1, 1, 2)
    turned = (q.transpose(1, 2), k.transpose(1, 2), angles.cos().to(dtype), angles.sin().to(dtype))
    yield FusedOp("rotary", partial(rotary, *turned), partial(plain_rotary, *turned))
    gate, up = draw(1, num_rows, 2 * shape.intermediate_size).chunk(2, dim=-1)
    for activation in Activation:
        yield FusedOp(
            f"gated {activation.name.lower()}",
            partial(gated_activation, gate, up, activation),
            partial(plain_gated_activation, gate, up, activation),
        )


def _norm_op(name: str, x: Tensor, weight: Tensor, form: NormForm) -> FusedOp:
    given = (x, weight, EPS, form)
    return FusedOp(name, partial(rms_norm, *given), partial(plain_rms_norm, *given))


def check_fused_layers(device: str) -> dict[str, Any]:
    """The ops whose results differ from the plain op's on this device by more than a few last
    bits."""
    torch.manual_seed(0)
    differing, num_cases = [], 0
    for shape in SHAPES:
        for num_rows in CHECKED_ROWS:
            for dtype in DTYPES:
                for op in fused_ops(shape, num_rows, dtype, torch.device(device)):
                    num_cases += 1
                    if not op.agrees():
                        differing.append(f"{op.name}, {shape.hidden_size}, {num_rows}, {dtype}")
    return {"ok": not differing, "cases": num_cases, "differing": differing}


def time_fused_layers(device: str) -> list[dict[str, Any]]:
    """Microseconds of each op in bf16, replayed from a graph, beside the plain op."""
    torch.manual_seed(0)
    return [
        {
            "op": op.name,
            "rows": num_rows,
            "microseconds": round(1e6 * graph_seconds(op.fused), 1),
            "plain_microseconds": round(1e6 * graph_seconds(op.plain), 1),
        }
        for num_rows in TIMED_ROWS
        for op in fused_ops(SHAPES[0], num_rows, torch.bfloat16, torch.device(device))
    ]
