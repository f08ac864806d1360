"""Layers that drafts leave out are chosen by what the base would accept."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.layer_subset import LayerSubset
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.speculation import draft_costs
from loraplex.engine.speculation.draft_costs import DraftCosts, measure_costs
from loraplex.engine.speculation.draft_trial import DraftTrial, prefixes_of
from loraplex.engine.speculation.layer_choice import (
    Forecast,
    LayerSet,
    forecast,
    last_layers,
    search,
)
from loraplex.engine.speculation.training_texts import TrainingText
from support.families import FOUR_LAYERS, SERVED, VOCAB_SIZE, save_family

NUM_LAYERS = 4
NUM_TOKENS = 3
ALL_SETS = [
    frozenset(each)
    for size in range(1, NUM_LAYERS)
    for each in combinations(range(NUM_LAYERS), size)
]
COSTS = DraftCosts(0.1, [1.05, 1.1, 1.15], NUM_LAYERS)


def prefixes() -> list[list[int]]:
    """Of all lengths around a block's."""
    rng = Random(2)
    lengths = 2 * (2, 3, 15, 16, 17, 18, 33)
    return [rng.choices(range(3, VOCAB_SIZE), k=length) for length in lengths]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose layers change their input little, so that drafts are sometimes right."""
    shape = {**FOUR_LAYERS, "eos_token_id": None}
    path = save_family(tmp_path_factory.mktemp("base"), "llama", shape)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer, scale in zip(model.model.layers, (1.0, 0.3, 0.7, 0.5), strict=True):
            layer.self_attn.o_proj.weight *= scale
            layer.mlp.down_proj.weight *= scale
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def base(path: Path) -> BaseModel:
    return load_base_model(EngineConfig(str(path), device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def trial(base: BaseModel) -> DraftTrial:
    return DraftTrial(base, prefixes(), num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[LayerSet, list[float]]:
    """What transformers accepts of the drafts without each set of layers."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    counts = {each: [0] * NUM_TOKENS for each in ALL_SETS}
    for prefix in prefixes():
        cache = cache_of(model, prefix)
        answer = continued(model, prefix, deepcopy(cache), LayerSet())
        for left_out, right in counts.items():
            drafted = continued(model, prefix, deepcopy(cache), left_out)
            for place in range(NUM_TOKENS):
                right[place] += drafted[: place + 1] == answer[: place + 1]
    return {each: [count / len(prefixes()) for count in right] for each, right in counts.items()}


def cache_of(model: Any, prefix: Sequence[int]) -> DynamicCache:
    """What the whole model keeps of a prefix, its last token apart."""
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([prefix[:-1]]), None, None, cache)  # its name differs by release
    return cache


def continued(
    model: Any, prefix: Sequence[int], cache: DynamicCache, left_out: LayerSet
) -> list[int]:
    """Greedy tokens without some layers, after the prefix in `cache`, which is changed."""
    tokens, whole = [prefix[-1]], model.model.layers
    with torch.inference_mode():
        model.model.layers = nn.ModuleList(
            layer for index, layer in enumerate(whole) if index not in left_out
        )
        model.config.num_hidden_layers = len(model.model.layers)
        try:
            for place in range(NUM_TOKENS):
                position = len(prefix) - 1 + place
                # Its own mask would have the length that the first layer's cache has.
                sees_all = torch.zeros(1, 1, 1, position + 1)
                token, positions = torch.tensor([tokens[-1:]]), torch.tensor([[position]])
                logits = model(token, sees_all, positions, cache).logits
                tokens.append(int(logits[0, -1].argmax()))
        finally:
            model.model.layers = whole
            model.config.num_hidden_layers = len(whole)
    return tokens[1:]


@pytest.mark.slow
def test_as_many_draft_tokens_are_right_as_in_transformers(
    base: BaseModel, trial: DraftTrial, expected: dict[LayerSet, list[float]]
) -> None:
    found = {each: list(forecast(base, trial, COSTS, each).accepted) for each in ALL_SETS}
    assert found == {each: pytest.approx(shares) for each, shares in expected.items()}
    assert len({tuple(shares) for shares in expected.values()}) > 3, "the sets differ"


@pytest.mark.slow
def test_a_wide_search_finds_the_best_set_of_each_size(
    base: BaseModel, trial: DraftTrial, expected: dict[LayerSet, list[float]]
) -> None:
    found = list(search(NUM_LAYERS, 99, lambda each: forecast(base, trial, COSTS, each)))
    for size, each in enumerate(found, start=1):
        ratios = [
            tokens_per_second(shares, NUM_LAYERS - size)
            for left_out, shares in expected.items()
            if len(left_out) == size
        ]
        assert len(each.left_out) == size
        assert each.ratio == pytest.approx(max(ratios))


def tokens_per_second(shares: Sequence[float], num_kept: int) -> float:
    """Of the best draft length, relative to plain decoding, by the definition."""
    best = 0.0
    for count in range(1, NUM_TOKENS + 1):
        tokens = 1.0 + sum(shares[:count])
        drafting = count * (0.1 + 0.9 * num_kept / NUM_LAYERS)
        best = max(best, tokens / (drafting + 1.0 + 0.05 * count))
    return best


@pytest.mark.slow
def test_layers_that_do_nothing_are_found(tmp_path: Path) -> None:
    path = save_family(tmp_path, "llama", {**FOUR_LAYERS, "eos_token_id": None})
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    for index in (0, 2):
        nn.init.zeros_(model.model.layers[index].self_attn.o_proj.weight)
        nn.init.zeros_(model.model.layers[index].mlp.down_proj.weight)
    model.save_pretrained(path)
    base = load_base_model(EngineConfig(str(path), device="cpu", dtype="float32"))
    trial = DraftTrial(base, prefixes(), num_tokens=NUM_TOKENS)
    found = list(search(NUM_LAYERS, 1, lambda each: forecast(base, trial, COSTS, each)))
    best = max(found, key=lambda each: each.ratio)
    assert best.left_out == {0, 2}
    whole = LayerSubset("skip", base.model, base.config, range(NUM_LAYERS))
    assert best.accepted == trial.accepted(whole)
    assert best.num_tokens == NUM_TOKENS


def test_a_narrow_search_measures_fewer_sets_and_still_those_of_early_exit() -> None:
    measured: list[LayerSet] = []

    def count(left_out: LayerSet) -> Forecast:
        measured.append(left_out)
        return Forecast(left_out, [0.0], 1, 1.0 + 0.01 * (0 in left_out))

    found = list(search(8, 1, count))
    assert len(set(measured)) == len(measured) < 2**8 / 4
    assert {last_layers(8, size) for size in range(1, 8)} <= set(measured)
    assert all(0 in each.left_out for each in found)


def test_an_answer_that_ends_takes_no_more_draft_tokens(base: BaseModel, path: Path) -> None:
    whole = LayerSubset("skip", base.model, base.config, range(NUM_LAYERS))
    free = DraftTrial(base, prefixes()[:1], num_tokens=NUM_TOKENS)
    assert free.accepted(whole) == [1.0, 1.0, 1.0]
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    (prefix, *_) = prefixes()
    answer = continued(model, prefix, cache_of(model, prefix), LayerSet())
    second = answer[1]
    own, ends = base.eos_token_ids, frozenset([second])
    object.__setattr__(base, "eos_token_ids", ends)
    try:
        ending = DraftTrial(base, prefixes()[:1], num_tokens=NUM_TOKENS)
    finally:
        object.__setattr__(base, "eos_token_ids", own)
    num_answered = answer.index(second) + 1
    assert ending.accepted(whole) == [1.0] * num_answered + [0.0] * (NUM_TOKENS - num_answered)


@pytest.mark.parametrize("case", ["gemma2-softcap-window", "deepseek_v3-mla", "gpt2-conv1d"])
def test_every_draft_token_of_all_layers_is_right(case: str, tmp_path: Path) -> None:
    model_type, differences = SERVED[case]
    path = save_family(tmp_path, model_type, {**differences, **FOUR_LAYERS, "eos_token_id": None})
    base = load_base_model(EngineConfig(str(path), device="cpu", dtype="float32"))
    whole = LayerSubset("skip", base.model, base.config, range(NUM_LAYERS))
    trial = DraftTrial(base, prefixes(), num_tokens=NUM_TOKENS)
    assert trial.accepted(whole) == [1.0, 1.0, 1.0]


class _ElementClock(TorchDispatchMode):
    """An operation takes one second for each element of its output, whatever else runs."""

    _seconds = 0

    def now(self) -> int:
        return self._seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._seconds += sum(leaf.numel() for leaf in tree_leaves(output) if torch.is_tensor(leaf))
        return output


def test_measured_costs_rank_passes_by_what_they_compute(
    base: BaseModel, trial: DraftTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _ElementClock() as clock:  # type: ignore[no-untyped-call]
        monkeypatch.setattr(draft_costs, "perf_counter", clock.now)
        costs = measure_costs(base, trial)
    assert costs.num_layers == NUM_LAYERS
    assert 0.0 < costs.outside < 1.0
    assert costs.of_draft_token(NUM_LAYERS) == pytest.approx(1.0)
    assert costs.of_draft_token(1) < costs.of_draft_token(2)
    assert len(costs.verification) == NUM_TOKENS
    assert 1.0 < costs.verification[0] < costs.verification[1] < costs.verification[2]


def test_prefixes_are_drawn_from_all_that_end_before_a_token_to_learn() -> None:
    texts = [TrainingText(range(100), 40), TrainingText(range(200, 212), 0)]
    every = prefixes_of(texts, 999, max_tokens=90)
    assert sorted(map(len, every)) == sorted([*range(40, 91), *range(2, 12)])
    assert all(list(each) == list(range(each[0], each[0] + len(each))) for each in every)
    few = [len(each) for each in prefixes_of(texts, 8, max_tokens=90)]
    assert len(set(few)) == 8
    assert max(few) > 60
    assert few == [len(each) for each in prefixes_of(texts, 8, max_tokens=90)]


def test_texts_without_room_for_a_draft_are_refused(base: BaseModel) -> None:
    none = prefixes_of([TrainingText(range(100), 95)], 8, max_tokens=90)
    with pytest.raises(InvalidParameter, match="no text leaves room for a draft"):
        DraftTrial(base, none, num_tokens=NUM_TOKENS)
