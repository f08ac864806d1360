"""Garbage is collected when no request waits, and eventually in any case."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from loraplex.engine.process import gc_tuning as garbage
from loraplex.engine.process.gc_tuning import (
    BUSY_SECONDS,
    IDLE_SECONDS,
    RETURN_SECONDS,
    GarbageCollection,
)


class Knot:
    def __init__(self) -> None:
        self.itself = self


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize(("is_idle", "seconds"), [(True, IDLE_SECONDS), (False, BUSY_SECONDS)])
def test_a_cycle_goes_when_it_is_due_and_not_before(is_idle: bool, seconds: float) -> None:
    clock = Clock()
    collection = GarbageCollection(clock)
    assert not gc.isenabled()
    knot = weakref.ref(Knot())
    clock.now += seconds - 0.5
    assert not collection.collect_if_due(is_idle=is_idle)
    assert knot() is not None
    clock.now += 1.0
    assert collection.collect_if_due(is_idle=is_idle)
    assert knot() is None
    assert not collection.collect_if_due(is_idle=is_idle)


def test_freed_memory_is_given_back_at_the_start_and_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, returned = Clock(), []
    start = clock.now
    monkeypatch.setattr(garbage, "return_freed_memory", lambda: returned.append(clock.now - start))
    collection = GarbageCollection(clock)
    for _ in range(int(2.5 * RETURN_SECONDS)):
        clock.now += 1.0
        collection.collect_if_due(is_idle=True)
    assert len(returned) == 3
    assert returned[0] == 0
    assert returned[1] >= RETURN_SECONDS
    assert returned[2] - returned[1] >= RETURN_SECONDS
