"""A server seldom looks for garbage, and never among what it began with."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from loraplex.api.server.gc_tuning import YOUNG_OBJECTS, look_for_garbage_seldom


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_cycles_still_go_and_what_was_there_is_left_alone() -> None:
    look_for_garbage_seldom()
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
