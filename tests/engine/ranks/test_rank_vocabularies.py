"""Tokens whose rows several ranks hold: adapters that add or train tokens equal PEFT, and what a
request reads of all tokens equals transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import DeleteAdapter, Pooling
from loraplex.engine.ranks.follower import Follower
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.features import change_weights, dense_logits, draw_bias, load_plain
from support.marks import PEFT_PATTERNS, marked_slow
from support.ranks import followers_as_threads
from support.resized_adapters import RECIPES, save_resized

pytestmark = PEFT_PATTERNS
TOLERANCE = 1e-4
THREE_RANKS: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""They hold 48, 48 and 32 of the 128 tokens."""
BASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "unequal parts": ("llama", THREE_RANKS, 3),
    "tied": (*SERVED["gemma2-softcap-window"], 4),
    "head with bias": ("phi", {}, 2),
}
"""Name to model type, what differs from the common tiny configuration, and ranks."""
PROMPT = [*range(3, 30), 60, 90, 127]


@contextmanager
def serving(
    model: Path, folder: Path, num_ranks: int, **settings: Any
) -> Iterator[tuple[LocalEngine, list[Follower]]]:
    with followers_as_threads() as followers:
        engine = LocalEngine(
            model,
            folder,
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=num_ranks,
            **settings,
        )
        yield engine, followers
        engine.close()


@pytest.mark.parametrize("name", marked_slow(["unequal parts", "tied"], slow=["tied"]))
def test_every_way_of_adding_tokens_equals_peft_in_one_mixed_batch(
    name: str, tmp_path: Path
) -> None:
    kind, settings, num_ranks = BASES[name]
    model = save_family(tmp_path / "base", kind, settings)
    tuned = {
        recipe: save_resized(model, tmp_path / recipe, RECIPES[recipe], seed=seed)
        for seed, recipe in enumerate(RECIPES)
    }
    prompts = {
        recipe: [7, *range(VOCAB_SIZE, VOCAB_SIZE + RECIPES[recipe].num_added), 5, 90, *PROMPT[:-1]]
        for recipe in RECIPES
    }
    with serving(model, tmp_path, num_ranks) as (engine, _):
        ids = {
            recipe: engine.submit(
                prompts[recipe],
                engine.add_adapter(tmp_path / recipe),
                max_tokens=1,
                return_logits=True,
            )
            for recipe in RECIPES
        }
        plain = engine.submit(PROMPT, max_tokens=1, return_logits=True)
        engine.run()
    expected = dense_logits(load_plain(model), PROMPT)[-1]
    assert (logits_of(engine, plain)[:VOCAB_SIZE] - expected).abs().max() < TOLERANCE
    for recipe, request_id in ids.items():
        expected = dense_logits(tuned[recipe], prompts[recipe])[-1]
        ours = logits_of(engine, request_id)[: len(expected)]
        assert (ours - expected).abs().max() < TOLERANCE, recipe


def logits_of(engine: LocalEngine, request_id: str) -> torch.Tensor:
    """Of a request's first token."""
    answer = engine.answers[request_id]
    assert answer.end.error is None
    logits = answer.tokens[0].logits
    assert logits is not None
    return torch.from_numpy(np.frombuffer(logits, dtype=np.float32).copy())


@pytest.mark.parametrize("name", marked_slow(BASES, slow=["tied", "unequal parts"]))
def test_prompt_logprobs_and_embeddings_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, settings, num_ranks = BASES[name]
    model = save_family(tmp_path / "base", kind, settings)
    change_weights(model, draw_bias)
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    with serving(model, tmp_path, num_ranks, **chunks) as (engine, _):
        read = engine.submit(PROMPT, max_tokens=1, num_prompt_logprobs=0)
        pooled = engine.submit(PROMPT, max_tokens=0, pooling=Pooling.LAST)
        engine.run()
    plain = load_plain(model)
    logits = dense_logits(plain, PROMPT)
    expected = logits.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    parts = engine.answers[read].prompts
    found = torch.tensor([entry.chosen.logprob for part in parts for entry in part.logprobs])
    assert found.allclose(expected, atol=TOLERANCE)
    with torch.inference_mode():
        states = plain.model(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0, -1]
    vector = engine.answers[pooled].prompts[-1].embedding
    assert vector is not None
    ours = torch.from_numpy(np.frombuffer(vector, dtype=np.float32).copy())
    assert (ours - states).abs().max() < TOLERANCE


def test_no_rank_holds_a_byte_of_a_deleted_adapters_ends(tmp_path: Path) -> None:
    kind, settings, num_ranks = BASES["unequal parts"]
    model = save_family(tmp_path / "base", kind, settings)
    save_resized(model, tmp_path / "adapter", RECIPES["whole ends"], seed=0)
    with serving(model, tmp_path, num_ranks) as (engine, followers):
        key: AdapterKey = engine.add_adapter(tmp_path / "adapter")
        engine.generate(PROMPT, key)
        assert all(follower.arena.flat.any() for follower in followers)
        engine.core.handle(DeleteAdapter(key, drain_seconds=1.0))
        engine.run()
        assert engine.evicted == [key]
        assert not any(follower.arena.flat.any() for follower in followers)
        assert not any(follower.host.pool.any() for follower in followers)
