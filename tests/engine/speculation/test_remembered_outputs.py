"""Outputs are remembered by adapter version, within bounds of tokens and time, the latest ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loraplex.adapters.identity import AdapterKey, composed_key
from loraplex.engine.speculation import remembered_outputs
from loraplex.engine.speculation.remembered_outputs import (
    MAX_AGE_SECONDS,
    MAX_PARTS,
    PART_TOKENS,
    SETTLING_SECONDS,
    RememberedOutputs,
)

ONE, TWO = AdapterKey("acme", "sha256:1"), AdapterKey("acme", "sha256:2")
SAME_CONTENT = AdapterKey("bolt", ONE.digest)


def remember(
    outputs: RememberedOutputs,
    key: AdapterKey,
    tokens: Sequence[int],
    *,
    now: float = 0.0,
    arrived_at: float | None = None,
    start: int = 0,
) -> None:
    outputs.add(key, tokens, start, arrived_at=now if arrived_at is None else arrived_at, now=now)


def followers(outputs: RememberedOutputs, key: AdapterKey, text: list[int]) -> list[int]:
    """The tokens that followed the end of this text."""
    return [
        part.continuation(position, 1)[0]
        for part in outputs.of(key)
        for position in part.find(text).positions
    ]


def test_versions_and_tenants_do_not_see_each_others_outputs() -> None:
    outputs = RememberedOutputs()
    for token, key in enumerate((ONE, TWO, SAME_CONTENT)):
        remember(outputs, key, [9, token])
    assert [followers(outputs, key, [9]) for key in (ONE, TWO, SAME_CONTENT)] == [[0], [1], [2]]
    assert followers(outputs, AdapterKey("acme", "sha256:3"), [9]) == []


def test_a_version_keeps_its_latest_outputs_within_its_bound() -> None:
    outputs = RememberedOutputs()
    half = PART_TOKENS // 2
    for number in range(4 * MAX_PARTS):
        remember(outputs, ONE, [number, *[99] * (half - 2), 100 + number])
        assert outputs.num_tokens <= MAX_PARTS * PART_TOKENS
    kept = [number for number in range(4 * MAX_PARTS) if followers(outputs, ONE, [number])]
    assert kept == list(range(4 * MAX_PARTS))[-len(kept) :]
    assert outputs.num_tokens == len(kept) * half == MAX_PARTS * PART_TOKENS


def test_of_a_long_output_the_end_is_kept() -> None:
    outputs = RememberedOutputs()
    remember(outputs, ONE, [7, 8, *[0] * PART_TOKENS, 5, 6], start=1)
    assert outputs.num_tokens == PART_TOKENS
    assert followers(outputs, ONE, [5]) == [6]
    assert followers(outputs, ONE, [7]) == []


def test_an_empty_output_leaves_nothing() -> None:
    outputs = RememberedOutputs()
    remember(outputs, ONE, [1, 2], start=2)
    assert (outputs.num_tokens, outputs.of(ONE)) == (0, [])


def test_beyond_the_bound_of_all_versions_the_oldest_outputs_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remembered_outputs, "MAX_TOKENS", 10)
    outputs = RememberedOutputs()
    for now, key in enumerate((TWO, ONE, SAME_CONTENT, TWO)):
        remember(outputs, key, [9, now, 1, 2], now=float(now))
        assert outputs.num_tokens <= 10
    assert outputs.num_tokens == 8
    assert [followers(outputs, key, [9]) for key in (ONE, SAME_CONTENT, TWO)] == [[], [2], [3]]


def test_no_output_is_kept_for_longer_than_an_hour() -> None:
    outputs = RememberedOutputs()
    for minute in range(600):
        now = 60.0 * minute
        outputs.drop_old(now)
        remember(outputs, ONE, [5000, 0, 1000 + minute], now=now)
        kept = sorted(token - 1000 for token in followers(outputs, ONE, [0]))
        assert kept == list(range(kept[0], minute + 1))
        assert now - 60.0 * kept[0] < MAX_AGE_SECONDS
        assert minute < 60 or len(kept) >= 45
    outputs.drop_old(now + MAX_AGE_SECONDS)
    assert (outputs.num_tokens, outputs.of(ONE)) == (0, [])


def test_a_request_that_is_older_than_what_may_be_kept_is_not_remembered() -> None:
    outputs = RememberedOutputs()
    remember(outputs, ONE, [1, 2], now=MAX_AGE_SECONDS + 1, arrived_at=0.5)
    assert outputs.num_tokens == 0


def test_what_is_forgotten_is_gone_with_its_compositions_and_nothing_else() -> None:
    outputs, composition = RememberedOutputs(), composed_key("acme", {ONE.digest: 1, TWO.digest: 1})
    for key in (ONE, TWO, SAME_CONTENT, composition):
        remember(outputs, key, [9, 1])
    outputs.forget(ONE, 0.0)
    assert outputs.num_tokens == 4
    kept = [bool(outputs.of(key)) for key in (ONE, composition, TWO, SAME_CONTENT)]
    assert kept == [False, False, True, True]


def test_requests_that_were_open_when_their_outputs_were_forgotten_are_not_remembered() -> None:
    outputs, composition = RememberedOutputs(), composed_key("acme", {ONE.digest: 1, TWO.digest: 1})
    outputs.forget(ONE, 100.0)
    for key in (ONE, composition):
        remember(outputs, key, [9, 1], arrived_at=99.0, now=200.0)
        remember(outputs, key, [9, 1], arrived_at=99.0 + SETTLING_SECONDS, now=200.0)
    assert outputs.num_tokens == 0
    remember(outputs, TWO, [9, 1], arrived_at=99.0, now=200.0)
    remember(outputs, ONE, [9, 1], arrived_at=100.0 + SETTLING_SECONDS, now=200.0)
    assert outputs.num_tokens == 4


def test_a_request_that_outlives_the_note_of_forgetting_is_not_remembered() -> None:
    outputs = RememberedOutputs()
    outputs.forget(ONE, 100.0)
    later = 2 * MAX_AGE_SECONDS
    outputs.drop_old(later)
    remember(outputs, ONE, [9, 1], arrived_at=99.0, now=later)
    assert outputs.num_tokens == 0
