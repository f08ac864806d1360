"""What keys receive, which tokens stay, and what is moved, against loops over heads and tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loraplex.kernels import kv_eviction
from loraplex.kernels.attention import AttentionOptions
from loraplex.kernels.kv_eviction import attention_mass, most_attended, move_tokens
from loraplex.kernels.kv_pages import KvPages, make_pages
from support.attention_cases import pages_apart

HEADS, KV_HEADS, DIM = 6, 2, 8
OPTIONS = {
    "plain": AttentionOptions(0.7),
    "softcap": AttentionOptions(0.7, softcap=1.5),
    "sinks": AttentionOptions(0.7, sinks=torch.linspace(-1, 1, HEADS)),
}


def expected_mass(q: Tensor, keys: Tensor, first_place: int, options: AttentionOptions) -> Tensor:
    mass = torch.zeros(KV_HEADS, len(keys))
    for number, query in enumerate(q):
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            scores = [float(query[head] @ key[own]) * options.scale for key in keys]
            if options.softcap:
                scores = [math.tanh(s / options.softcap) * options.softcap for s in scores]
            seen = scores[: first_place + number + 1]
            others = [] if options.sinks is None else [float(options.sinks[head])]
            total = sum(map(math.exp, [*seen, *others]))
            for place, score in enumerate(seen):
                mass[own, place] += math.exp(score) / total
    return mass


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("max_scores", [1, 200, 1 << 24])
def test_mass_is_the_sum_of_the_weights_of_the_heads_that_share_a_key(
    monkeypatch: pytest.MonkeyPatch, name: str, max_scores: int
) -> None:
    monkeypatch.setattr(kv_eviction, "MAX_SCORES", max_scores)
    torch.manual_seed(0)
    q, keys = torch.randn(5, HEADS, DIM), torch.randn(13, KV_HEADS, DIM)
    found = attention_mass(q, keys, 8, OPTIONS[name])
    torch.testing.assert_close(found, expected_mass(q, keys, 8, OPTIONS[name]))


def test_the_last_tokens_stay_whatever_they_received() -> None:
    mass = torch.tensor([[5.0, 1, 4, 0, 0], [0, 1, 2, 9, 9]])
    kept = most_attended(mass, budget=4, num_recent=2)
    assert kept.tolist() == [[0, 2, 3, 4], [1, 2, 3, 4]]


def test_of_equal_tokens_the_first_stays() -> None:
    assert most_attended(torch.ones(1, 6), budget=3, num_recent=1).tolist() == [[0, 1, 5]]


def test_pooling_keeps_the_neighbors_of_an_attended_token_but_none_from_the_last_ones() -> None:
    mass = torch.tensor([[0.0, 0, 0, 0, 1, 0, 0, 0, 0.5, 9]])
    assert most_attended(mass, budget=4, num_recent=1, pool_width=3).tolist() == [[3, 4, 5, 9]]


@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("code_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_moved_tokens_are_stored_as_they_were(
    code_dtype: torch.dtype | None, are_apart: bool
) -> None:
    pages: KvPages = make_pages(
        (6, 4, KV_HEADS, DIM),
        dtype=torch.float32,
        code_dtype=code_dtype,
        device=torch.device("cpu"),
    )
    if are_apart:
        pages, _ = pages_apart(pages, pages, dtype=torch.float32)
    pages.write(torch.arange(4, 24), torch.randn(20, KV_HEADS, DIM))
    before = pages.gather(torch.arange(6)).flatten(0, 1).clone()
    sources, targets = torch.tensor([[4, 9, 11], [5, 9, 15]]), torch.tensor([21, 16, 17])
    move_tokens(pages, sources, targets)
    after = pages.gather(torch.arange(6)).flatten(0, 1)
    expected = before.clone()
    for head in range(KV_HEADS):
        for source, target in zip(sources[head], targets, strict=True):
            expected[target, head] = before[source, head]
    assert torch.equal(after, expected)
