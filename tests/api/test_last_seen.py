"""Values are recalled for a bounded time, and then free their memory."""

from __future__ import annotations

import pytest

from loraplex.api.control_plane.last_seen import LastSeen

STALE_SECONDS = 100.0


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def seen(now: list[float]) -> LastSeen[str, int]:
    return LastSeen(STALE_SECONDS, max_entries=3, clock=lambda: now[0])


def test_a_value_is_recalled_until_it_is_stale(seen: LastSeen[str, int], now: list[float]) -> None:
    seen.note("a", 1)
    now[0] = STALE_SECONDS
    assert seen.recall("a") == 1
    now[0] += 0.1
    assert seen.recall("a") is None


def test_values_that_are_stale_are_dropped(seen: LastSeen[str, int], now: list[float]) -> None:
    seen.note("a", 1)
    seen.note("b", 2)
    now[0] = STALE_SECONDS + 1
    seen.note("c", 3)
    assert len(seen) == 1


def test_a_value_that_is_noted_again_stays(seen: LastSeen[str, int], now: list[float]) -> None:
    seen.note("a", 1)
    seen.note("b", 2)
    now[0] = STALE_SECONDS - 1
    seen.note("a", 3)
    now[0] = STALE_SECONDS + 1
    seen.note("c", 4)
    assert (seen.recall("a"), seen.recall("b"), len(seen)) == (3, None, 2)


def test_of_too_many_the_oldest_is_dropped(seen: LastSeen[str, int]) -> None:
    for number, name in enumerate("abcd"):
        seen.note(name, number)
    assert (seen.recall("a"), seen.recall("d"), len(seen)) == (None, 3, 3)
