"""Guessed tokens, chains and trees, computed beside each other: each as if it had come alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.model.base_model import load_base_model
from loraplex.engine.model.inputs import MAX_GROUPED_ROWS
from support.arena import load_adapters
from support.families import SERVED, VOCAB_SIZE, save_family
from support.models import make_adapter
from support.paged import paged_logits
from support.verified_rows import BASE_ADAPTER, Guess, Verifier, random_guess

TOLERANCE = 1e-4
WINDOW, SINKS = 11, 5


def guess(rng: random.Random, num_known: int, num_guessed: int, *, is_tree: bool = False) -> Guess:
    return random_guess(rng, num_known, num_guessed, vocab_size=VOCAB_SIZE, is_tree=is_tree)


def mixed_guesses() -> list[Guess]:
    """Plain decodes, chains and trees of many sizes, some longer than what is grouped."""
    rng = random.Random(0)
    chains = [(9, 0), (30, 0), (2, 1), (3, 4), (40, 3), (41, 4), (33, 7), (6, MAX_GROUPED_ROWS)]
    trees = [(1, 3), (3, 2), (30, 4), (38, 9), (50, 7), (35, MAX_GROUPED_ROWS + 6)]
    guesses = [guess(rng, *size) for size in chains]
    return guesses + [guess(rng, *size, is_tree=True) for size in trees]


def dense_logits(model: Any, tokens: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Of the last token, by transformers' own attention."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False, attention_mask=mask).logits
    last: Tensor = logits[0, -1]
    return last


def load_dense(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def additive_mask(num_tokens: int) -> Tensor:
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    visible = (key <= query) & ((key > query - WINDOW) | (key < SINKS))
    return torch.zeros(1, 1, num_tokens, num_tokens).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "gpt2-conv1d",
        "mistral-window",
        "gemma2-softcap-window",
        "gemma3-window",
        "gpt_oss-sinks-window",
        "deepseek_v2-mla",
    ],
)
def test_each_row_says_what_a_dense_forward_over_its_path_says(case: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[case])
    dense = load_dense(path)
    guesses = mixed_guesses()
    verifier = Verifier(load_base_model(EngineConfig(str(path), device="cpu")), guesses)
    verifier.prefill()
    for entry, ours in zip(guesses, verifier.verify(), strict=True):
        theirs = torch.stack([dense_logits(dense, text) for text in entry.texts])
        assert (ours - theirs).abs().max() < TOLERANCE


def test_the_operators_window_and_sinks_hold_by_position_within_a_tree(tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED["llama"])
    dense = load_dense(path)
    rng = random.Random(3)
    guesses = [guess(rng, size, 14, is_tree=True) for size in (1, 3, 8, 12, 30)]
    chain = guess(rng, 5, 14)
    guesses.append(chain._replace(tree=list(range(-1, 13))))  # deeper than the window
    verifier = Verifier(
        load_base_model(EngineConfig(str(path), device="cpu")),
        guesses,
        attention_window=WINDOW,
        attention_sinks=SINKS,
    )
    verifier.prefill()
    for entry, ours in zip(guesses, verifier.verify(), strict=True):
        masked = [dense_logits(dense, text, additive_mask(len(text))) for text in entry.texts]
        assert (ours - torch.stack(masked)).abs().max() < TOLERANCE


def test_rows_run_under_their_own_requests_adapters(tmp_path: Path) -> None:
    path = save_family(tmp_path / "base", *SERVED["llama"])
    base = load_base_model(EngineConfig(str(path), device="cpu"))
    folders = [
        make_adapter(path, tmp_path / f"{rank}", seed=rank, scale=0.15, r=rank) for rank in (2, 8)
    ]
    builder, adapters = load_adapters(base, folders, tmp_path)
    tuned = [PeftModel.from_pretrained(load_dense(path), folder).eval() for folder in folders]
    guesses = mixed_guesses()
    places = [index % 3 for index in range(len(guesses))]
    verifier = Verifier(
        base,
        guesses,
        builder=builder,
        adapters=[[*adapters, BASE_ADAPTER][place] for place in places],
    )
    verifier.prefill()
    models = [*tuned, load_dense(path)]
    for entry, place, ours in zip(guesses, places, verifier.verify(), strict=True):
        theirs = torch.stack([dense_logits(models[place], text) for text in entry.texts])
        assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", ["llama", "gemma3-window"])
def test_quantized_keys_and_values_are_those_that_decoding_reads(case: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[case])
    base = load_base_model(EngineConfig(str(path), device="cpu", kv_dtype=KvDtype.INT8))
    rng = random.Random(1)
    guesses = [guess(rng, 21, 6, is_tree=True), guess(rng, 30, 5), guess(rng, 33, 0)]
    verifier = Verifier(base, guesses)
    verifier.prefill()
    for entry, ours in zip(guesses, verifier.verify(), strict=True):
        served = paged_logits(base, entry.texts)
        theirs = torch.stack([logits[-1] for logits in served])
        assert (ours - theirs).abs().max() < TOLERANCE
