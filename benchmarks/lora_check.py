"""LoRA on CUDA: a row's result is bit-identical whatever shares its step, and vectors are right."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from loraplex.kernels.lora_vectors import apply_vectors
from support.lora_steps import LoraStep
from support.vector_steps import VectorStep

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROJECTIONS = ((4096, (4096, 1024, 1024)), (11008, (4096,)), (300, (40, 17)))
"""in_features and out_features: of an 8 B model, of one whose parts end in a block, of none."""
DECODE_ROWS = [0, 1, -1, 2, 3, 4, 1] * 3
PREFILLS = [(19, 3), (5, 3), (1, 1), (33, 4), (130, 0), (600, 2)]


def check_rows(device: str) -> dict[str, Any]:
    """Each run of a mixed step, by the kernels as they are compiled, against a step of its own."""
    from loraplex.kernels import lora_triton  # Triton is not installed everywhere

    torch.manual_seed(0)
    changed = {}
    for dtype, (in_features, outs) in product(DTYPES, PROJECTIONS):
        step = LoraStep(
            DECODE_ROWS, PREFILLS, in_features=in_features, outs=outs, dtype=dtype, device=device
        )
        name = f"{str(dtype).removeprefix('torch.')}, {in_features} to {sum(outs)}"
        changed[name] = step.changed_alone(lora_triton)
    return {"ok": not any(changed.values()), "runs_changed_by_others": changed}


def check_vectors(device: str) -> dict[str, Any]:
    """The op on adapters' vectors: the cases that differ from its definition, and the rows that
    others of the step change."""
    torch.manual_seed(0)
    differing, changed = [], {}
    for dtype, (_, outs), bias in product(DTYPES, PROJECTIONS, (None, *DTYPES)):
        step = VectorStep(DECODE_ROWS, outs=outs, dtype=dtype, bias=bias, device=device)
        name = f"{dtype}, {sum(outs)}, bias {bias}".replace("torch.", "")
        # PyTorch may fuse a product with a sum. In half types the product is exact in fp32.
        bound = 1e-6 if dtype is torch.float32 else 0.0
        if not torch.allclose(step.apply(apply_vectors), step.defined(), rtol=bound, atol=bound):
            differing.append(name)
        changed[name] = step.changed_alone(apply_vectors)
    is_ok = not differing and not any(changed.values())
    return {"ok": is_ok, "differing": differing, "rows_changed_by_others": changed}
