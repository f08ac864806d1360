"""The kernels of MoE layers on CUDA: results, independence of what shares the step, and times."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from benchmarks.attention_check import graph_seconds

from loraplex.kernels.expert_pairs import plain_sort_pairs
from loraplex.kernels.grouped_linear import multiply_grouped
from support.expert_steps import RANKS, ExpertKernels, ExpertStep
from support.lora_weights import assert_lora_close

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_TOKENS = (1, 5, 48)
TIMED_TOKENS = (1, 8, 32, 128, 256, 1024)
GROUPED_MAJORS = (9, 10)
"""The compute capabilities on which PyTorch's grouped matmul is one kernel, and can be captured."""


class ExpertsShape(NamedTuple):
    """One linear map of the experts of a layer."""

    num_experts: int
    top_k: int
    in_features: int
    out_features: int
    is_transposed: bool = False
    has_bias: bool = False


SHAPES = (
    ExpertsShape(8, 2, 4096, 14336),
    ExpertsShape(128, 8, 2048, 1536),
    ExpertsShape(32, 4, 2880, 2880, is_transposed=True, has_bias=True),
    ExpertsShape(5, 3, 300, 77, has_bias=True),
)
"""Of a Mixtral of 8 × 7 B, of a Qwen3 of 30 B, of a gpt-oss of 20 B, and of none."""


def check_experts(device: str, kernels: ExpertKernels | None = None) -> dict[str, Any]:
    """Sorting, base matmul and LoRA of random routings: the cases that differ from their
    definition, and the tokens that others of the step change.

    `kernels`: by default those that are compiled.
    """
    kernels = kernels or _compiled()
    torch.manual_seed(0)
    differing, changed = [], {}
    for dtype, shape in product(DTYPES, SHAPES):
        for num_tokens in NUM_TOKENS:
            step = _draw(shape, num_tokens, dtype=dtype, device=device)
            name = f"{str(dtype).removeprefix('torch.')}, {num_tokens} tokens, {tuple(shape)}"
            try:
                assert_lora_close(step.run(kernels), step.defined())
            except AssertionError:
                differing.append(name)
            changed[name] = step.changed_alone(kernels)
    is_ok = not differing and not any(changed.values())
    return {"ok": is_ok, "differing": differing, "tokens_changed_by_others": changed}


def time_experts(device: str) -> list[dict[str, Any]]:
    """Microseconds of sorting and of the base matmul in bf16, replayed from a graph, beside
    PyTorch's grouped matmul. Bytes per second count the matrices of the chosen experts once."""
    torch.manual_seed(0)
    rows, kernels = [], _compiled()
    for shape, num_tokens in product(SHAPES[:3], TIMED_TOKENS):
        step = _draw(shape, num_tokens, dtype=torch.bfloat16, device=device)
        pairs = step.sort(kernels.pairs)
        assert pairs.tiles is not None
        x, weight, tiles = step.x[pairs.tokens], step.weight, pairs.tiles.base
        seconds = graph_seconds(
            partial(
                kernels.linear.multiply_tiles,
                *(x, weight, step.bias, tiles),
                is_transposed=shape.is_transposed,
            )
        )
        num_chosen = len(set(pairs.experts.tolist()))
        row: dict[str, Any] = {
            **{"experts": shape.num_experts, "top_k": shape.top_k, "tokens": num_tokens},
            "sort_microseconds": _microseconds(partial(step.sort, kernels.pairs)),
            "microseconds": round(1e6 * seconds, 1),
            "gigabytes_per_second": round(num_chosen * weight[0].nbytes / seconds / 1e9),
        }
        if torch.cuda.get_device_capability()[0] in GROUPED_MAJORS:
            plain = plain_sort_pairs(step.top_k_index, shape.num_experts)
            matrices = weight if shape.is_transposed else weight.transpose(1, 2)
            row["grouped_mm_microseconds"] = _microseconds(
                partial(multiply_grouped, x, matrices, plain)
            )
        rows.append(row)
    return rows


def _microseconds(function: Callable[[], object]) -> float:
    return round(1e6 * graph_seconds(function), 1)


def _compiled() -> ExpertKernels:
    # Triton is not installed everywhere.
    from loraplex.kernels import expert_pairs_triton, grouped_linear_triton, lora_triton

    return ExpertKernels(expert_pairs_triton, grouped_linear_triton, lora_triton)


def _draw(shape: ExpertsShape, num_tokens: int, *, dtype: torch.dtype, device: str) -> ExpertStep:
    rng = random.Random(num_tokens)
    return ExpertStep(
        [rng.sample(range(shape.num_experts), shape.top_k) for _ in range(num_tokens)],
        [rng.randrange(-1, len(RANKS)) for _ in range(num_tokens)],
        num_experts=shape.num_experts,
        in_features=shape.in_features,
        out_features=shape.out_features,
        is_transposed=shape.is_transposed,
        has_bias=shape.has_bias,
        dtype=dtype,
        device=device,
    )
