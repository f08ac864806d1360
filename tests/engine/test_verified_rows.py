"""Draft chains and trees, verified together: each as if it were alone."""

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
from loraplex.engine.model.inputs import MAX_GROUPED_ROWS
from loraplex.engine.model.whole_base import load_base_model
from support.arena import load_adapters
from support.families import SERVED, VOCAB_SIZE, save_family
from support.models import make_adapter
from support.paged import paged_logits
from support.verified_rows import BASE_ADAPTER, DraftRows, Verifier, random_draft

TOLERANCE = 1e-4
WINDOW, SINKS = 11, 5


def draft_token(
    rng: random.Random, num_known: int, num_drafted: int, *, is_tree: bool = False
) -> DraftRows:
    return random_draft(rng, num_known, num_drafted, vocab_size=VOCAB_SIZE, is_tree=is_tree)


def mixed_drafts() -> list[DraftRows]:
    """Plain decodes, chains and trees of many sizes, some longer than what is grouped."""
    rng = random.Random(0)
    chains = [(9, 0), (30, 0), (2, 1), (3, 4), (40, 3), (41, 4), (33, 7), (6, MAX_GROUPED_ROWS)]
    trees = [(1, 3), (3, 2), (30, 4), (38, 9), (50, 7), (35, MAX_GROUPED_ROWS + 6)]
    draft_tokens = [draft_token(rng, *size) for size in chains]
    return draft_tokens + [draft_token(rng, *size, is_tree=True) for size in trees]


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
        pytest.param("llama4-chunks", marks=pytest.mark.slow),
        "deepseek_v2-mla",
    ],
)
def test_each_row_says_what_a_dense_forward_over_its_path_says(case: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[case])
    dense = load_dense(path)
    draft_tokens = mixed_drafts()
    verifier = Verifier(load_base_model(EngineConfig(str(path), device="cpu")), draft_tokens)
    verifier.prefill()
    for entry, ours in zip(draft_tokens, verifier.verify(), strict=True):
        theirs = torch.stack([dense_logits(dense, text) for text in entry.texts])
        assert (ours - theirs).abs().max() < TOLERANCE


def test_the_operators_window_and_sinks_hold_by_position_within_a_tree(tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED["llama"])
    dense = load_dense(path)
    rng = random.Random(3)
    draft_tokens = [draft_token(rng, size, 14, is_tree=True) for size in (1, 3, 8, 12, 30)]
    chain = draft_token(rng, 5, 14)
    draft_tokens.append(chain._replace(tree=list(range(-1, 13))))  # deeper than the window
    verifier = Verifier(
        load_base_model(EngineConfig(str(path), device="cpu")),
        draft_tokens,
        attention_window=WINDOW,
        attention_sinks=SINKS,
    )
    verifier.prefill()
    for entry, ours in zip(draft_tokens, verifier.verify(), strict=True):
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
    draft_tokens = mixed_drafts()
    places = [index % 3 for index in range(len(draft_tokens))]
    verifier = Verifier(
        base,
        draft_tokens,
        builder=builder,
        adapters=[[*adapters, BASE_ADAPTER][place] for place in places],
    )
    verifier.prefill()
    models = [*tuned, load_dense(path)]
    for entry, place, ours in zip(draft_tokens, places, verifier.verify(), strict=True):
        theirs = torch.stack([dense_logits(models[place], text) for text in entry.texts])
        assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", ["llama", "gemma3-window"])
def test_quantized_keys_and_values_are_those_that_decoding_reads(case: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[case])
    base = load_base_model(EngineConfig(str(path), device="cpu", kv_dtype=KvDtype.INT8))
    rng = random.Random(1)
    draft_tokens = [
        draft_token(rng, 21, 6, is_tree=True),
        draft_token(rng, 30, 5),
        draft_token(rng, 33, 0),
    ]
    verifier = Verifier(base, draft_tokens)
    verifier.prefill()
    for entry, ours in zip(draft_tokens, verifier.verify(), strict=True):
        served = paged_logits(base, entry.texts)
        theirs = torch.stack([logits[-1] for logits in served])
        assert (ours - theirs).abs().max() < TOLERANCE
