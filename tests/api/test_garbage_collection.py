"""A server collects old garbage once a minute, but never the objects that exist at startup."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from loraplex.api.server import gc_tuning
from loraplex.api.server.gc_tuning import YOUNG_OBJECTS, collect_garbage, freeze_garbage


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_cycles_still_go_and_what_was_there_is_left_alone() -> None:
    freeze_garbage()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] == YOUNG_OBJECTS
    num_seen = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal num_seen
        num_seen += phase == "stop" and info["collected"] > 0

    gc.callbacks.append(count)
    try:
        for _ in range(2 * YOUNG_OBJECTS):
            knot: list[object] = []
            knot.append(knot)
    finally:
        gc.callbacks.remove(count)
    assert num_seen >= 1


class Knot:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def old_knot() -> weakref.ref[Knot]:
    knot = Knot()
    gc.collect(1)
    gc.collect(1)
    return weakref.ref(knot)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(gc_tuning, "POLL_SECONDS", 0.001)


async def until_collected(knot: weakref.ref[Knot]) -> None:
    async with asyncio.timeout(10):
        while knot() is not None:
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("_soon")
def test_old_garbage_goes_between_requests() -> None:
    is_idle = False

    async def scenario() -> None:
        nonlocal is_idle
        task = asyncio.create_task(collect_garbage(lambda: is_idle))
        knot = old_knot()
        await asyncio.sleep(0.05)
        assert knot() is not None
        is_idle = True
        await until_collected(knot)
        task.cancel()

    asyncio.run(scenario())


@pytest.mark.usefixtures("_soon")
def test_a_server_that_is_never_idle_collects_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "PATIENCE_SECONDS", 0.01)

    async def scenario() -> None:
        task = asyncio.create_task(collect_garbage(lambda: False))
        await until_collected(old_knot())
        task.cancel()

    asyncio.run(scenario())
