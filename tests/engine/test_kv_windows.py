"""Models with sliding windows, served far beyond the window with minimal pools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.model.whole_base import load_base_model
from support.families import SERVED, VOCAB_SIZE, save_family
from support.paged import paged_logits, served_logits

TOLERANCE = 1e-4
LENGTHS = (90, 1, 33, 57)
WINDOW, SINKS = 11, 5
INT8_KV_BOUNDS = {
    "llama": 0.05,
    "gemma3-window": 0.01,
    "deepseek_v2-mla": 0.05,
    "gpt2-conv1d": 0.02,
}
"""Root mean square of the error over that of the logits. Random weights of this size amplify what
any layer changes; a Llama with a quarter of it stays below 0.01."""


def random_sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]


def load_dense(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def dense_logits(model: Any, tokens: Sequence[int], **inputs: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False, **inputs).logits[0]
    return logits


def additive_mask(num_tokens: int, window: int, sinks: int) -> Tensor:
    """`[1, 1, num_tokens, num_tokens]`: 0 where the query sees the key, else minus infinity."""
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    visible = (key <= query) & ((key > query - window) | (key < sinks))
    return torch.zeros(1, 1, num_tokens, num_tokens).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize("case", [case for case in SERVED if "window" in case])
def test_what_lies_behind_a_window_is_freed_and_never_missed(case: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[case])
    base, dense = load_base_model(EngineConfig(str(path), device="cpu")), load_dense(path)
    sequences = random_sequences()
    for tokens, ours in zip(sequences, served_logits(base, sequences), strict=True):
        assert (ours - dense_logits(dense, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("sinks", [0, SINKS])
def test_the_operators_window_and_sinks_are_what_a_dense_mask_says(
    sinks: int, tmp_path: Path
) -> None:
    path = save_family(tmp_path, *SERVED["llama"])
    base, dense = load_base_model(EngineConfig(str(path), device="cpu")), load_dense(path)
    sequences = random_sequences()
    served = served_logits(base, sequences, attention_window=WINDOW, attention_sinks=sinks)
    for tokens, ours in zip(sequences, served, strict=True):
        mask = additive_mask(len(tokens), WINDOW, sinks)
        theirs = dense_logits(dense, tokens, attention_mask=mask)
        assert (ours - theirs).abs().max() < TOLERANCE
    assert (served[0] - dense_logits(dense, sequences[0])).abs().max() > 100 * TOLERANCE


def test_layers_with_a_window_of_their_own_keep_it_beside_the_operators(tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED["gemma2-softcap-window"])
    base, dense = load_base_model(EngineConfig(str(path), device="cpu")), load_dense(path)
    sequences = random_sequences()
    served = served_logits(base, sequences, attention_window=WINDOW, attention_sinks=SINKS)
    for tokens, ours in zip(sequences, served, strict=True):
        masks = {
            "full_attention": additive_mask(len(tokens), WINDOW, SINKS),
            "sliding_attention": additive_mask(len(tokens), 8, 0),
        }
        theirs = dense_logits(dense, tokens, attention_mask=masks)
        assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", INT8_KV_BOUNDS)
def test_int8_keys_and_values_change_logits_by_a_few_percent_at_most(
    case: str, tmp_path: Path
) -> None:
    path = save_family(tmp_path, *SERVED[case])
    exact = load_base_model(EngineConfig(str(path), device="cpu"))
    int8 = load_base_model(EngineConfig(str(path), device="cpu", kv_dtype=KvDtype.INT8))
    sequences = random_sequences()
    reference = torch.cat(paged_logits(exact, sequences))
    error = torch.cat(served_logits(int8, sequences)) - reference
    relative = (error.square().mean() / reference.square().mean()).sqrt()
    assert 0.0 < relative < INT8_KV_BOUNDS[case]
    assert exact.kv_error == 0.0
    assert 0.0 < int8.kv_error < 0.1, "what the operator is told"
