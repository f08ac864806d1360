"""Checks that what requests are charged with is what the engine has spent, once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledSequence

from .engine import SimulatedEngine
from .violation import Invariant, require

EPSILON = 1e-6
"""Of sums of floats, relative and absolute."""


class CostChecks:
    """Sums of its own beside those of the requests, over one life of an engine."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._busy_seconds = 0.0
        self._unread_seconds = 0.0
        """Of steps, since the last one that was read."""
        self._block_seconds = [0.0] * len(engine.kv.groups)
        """Blocks that anybody held times how long, by group."""
        self._charged_seconds = 0.0
        """To requests that are settled; so are the next two."""
        self._charged_block_seconds = [0.0] * len(engine.kv.groups)
        self._charged_bytes = 0

    def pass_time(self, seconds: float) -> None:
        """The clock is about to go on: until then, what is held stays held."""
        for index, group in enumerate(self._engine.kv.groups):
            num_held = group.pool.num_usable - group.pool.num_free
            self._block_seconds[index] += num_held * seconds

    def after_step(self, seconds: float) -> None:
        """Charge the steps that this iteration has read, then settle the requests that have ended.

        `seconds`: what the launched step takes, which is charged with the next steps that are read.
        """
        self._unread_seconds += seconds
        if read := self._engine.read_steps:
            self._charge(read, self._unread_seconds)
            self._unread_seconds = 0.0
        for request in self._engine.ended:
            self._settle(request)
        self._engine.ended.clear()

    def _charge(self, steps: Sequence[Sequence[ScheduledSequence]], seconds: float) -> None:
        self._busy_seconds += seconds
        for sequences in steps:
            self._engine.costs.charge(sequences, seconds / len(steps))

    def _settle(self, request: Request) -> None:
        request.is_settled = True
        self._charged_seconds += request.step_seconds
        self._charged_bytes += request.loaded_bytes
        for index, held_seconds in enumerate(request.kv.held_seconds):
            self._charged_block_seconds[index] += held_seconds

    def check(self, live: Iterable[Request]) -> None:
        """At any time between two steps."""
        unsettled = (*live, *self._engine.ended)
        charged = self._charged_seconds + sum(request.step_seconds for request in unsettled)
        spent = self._busy_seconds - self._engine.costs.unclaimed_seconds
        _require_equal(charged, spent, "seconds of steps")
        manager = self._engine.manager
        loaded = manager._loads.num_loaded_elements * self._engine.arena.element_bytes
        require(
            self._charged_bytes <= loaded,
            Invariant.CHARGED,
            f"{self._charged_bytes} bytes were charged, {loaded} loaded",
        )

    def check_blocks(self) -> None:
        """While nothing is held."""
        for charged, spent in zip(self._charged_block_seconds, self._block_seconds, strict=True):
            _require_equal(charged, spent, "seconds of blocks")


def _require_equal(charged: float, spent: float, unit: str) -> None:
    require(
        math.isclose(charged, spent, rel_tol=EPSILON, abs_tol=EPSILON),
        Invariant.CHARGED,
        f"{charged} {unit} were charged, {spent} spent",
    )
