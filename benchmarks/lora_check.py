"""LoRA on CUDA: a row's result is bit-identical whatever shares its step."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from support.lora_steps import LoraStep

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
