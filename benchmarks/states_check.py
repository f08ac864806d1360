"""Models with states on a device: their logits in chunks and mixed batches against transformers'
dense forward pass on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.whole_base import load_base_model
from support.families import STATES, VOCAB_SIZE, save_family
from support.paged import served_logits

TOLERANCE = 1e-3
"""Of the largest logit, in fp32."""
LENGTHS = (300, 1, 33, 57)


def check_states(
    folder: Path, *, device: str, cases: Sequence[str] = tuple(STATES)
) -> dict[str, Any]:
    """The largest error of each family; the families that this version of transformers computes
    with other functions are refused, and named."""
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for case in cases:
        model_type, settings = STATES[case]
        try:
            settings = {**settings, "max_position_embeddings": 512}
            path = save_family(folder / f"states-{case}", model_type, settings)
            base = load_base_model(EngineConfig(str(path), device=device, dtype="float32"))
        except (UnsupportedModel, ValueError, KeyError) as exc:  # an older transformers
            refused[case] = f"{type(exc).__name__}: {exc}"[:200]
            continue
        dense = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        error = 0.0
        for tokens, ours in zip(sequences, served_logits(base, sequences), strict=True):
            with torch.inference_mode():
                theirs = dense(torch.tensor([tokens]), use_cache=False).logits[0]
            worst = (ours.cpu() - theirs).abs().max() / theirs.abs().max()
            error = max(error, worst.item())
        errors[case] = error
    is_ok = all(error <= TOLERANCE for error in errors.values())
    return {"ok": is_ok, "errors": errors, "refused": refused}
