"""Adapters over a tiny model against PEFT, in one mixed batch with base rows."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.whole_base import load_base_model
from support.arena import load_adapters
from support.families import VOCAB_SIZE
from support.paged import paged_logits

TOLERANCE = 1e-4


def check_against_peft(model: Path, folders: list[Path], tmp_path: Path) -> None:
    """Raises AssertionError if a logit differs by `TOLERANCE` or more."""
    assert max(error for error, _ in logit_errors(model, folders, tmp_path)) < TOLERANCE


def logit_errors(model: Path, folders: list[Path], tmp_path: Path) -> list[tuple[float, float]]:
    """Each sequence's largest error of a logit, and its largest logit: of the base, of each
    adapter, of the base again.

    Raises AssertionError if an adapter has no effect.
    """
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    logits = mixed_logits(base, folders, tmp_path)
    return [
        ((ours - expected).abs().max().item(), expected.abs().max().item())
        for ours, expected in zip(logits, peft_logits(model, folders), strict=True)
    ]


def mixed_logits(base: BaseModel, folders: list[Path], blocks: Path) -> list[Tensor]:
    """The logits of one mixed batch: the base, each adapter, the base again."""
    builder, rows = load_adapters(base, folders, blocks)
    adapters = [(-1, 0), *rows, (-1, 0)]
    return paged_logits(base, _sequences(len(adapters)), builder=builder, adapters=adapters)


def peft_logits(model: Path, folders: list[Path]) -> list[Tensor]:
    """What PEFT computes of the same sequences, one by one. Raises AssertionError if an adapter
    has no effect."""
    logits = []
    wanted = [None, *folders, None]
    for folder, tokens in zip(wanted, _sequences(len(wanted)), strict=True):
        dense = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
        with torch.inference_mode():
            plain = dense(torch.tensor([tokens]), use_cache=False).logits[0]
            expected = plain
            if folder:
                tuned = PeftModel.from_pretrained(dense, folder).eval()
                expected = tuned(torch.tensor([tokens]), use_cache=False).logits[0]
                assert (expected - plain).abs().max() > 100 * TOLERANCE, "it must have an effect"
        logits.append(expected)
    return logits


def _sequences(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    lengths = [19 + 3 * index % 13 for index in range(count)]
    return [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]
