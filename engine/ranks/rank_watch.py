"""Finds the follower for which the others wait, and ends it. Then the group starts anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Event, Thread

from ..heartbeat import SILENT_LOOKS, Heartbeat, StallWatch
from ..shards.rank_place import GroupShape
from ..shards.rank_pulses import Pulse, RankPulses

HANG_SECONDS = 8.0
"""A follower without a sign of life for this long hangs. It is less than the supervisor's limit for
rank 0, so that the rank is named."""

_log = logging.getLogger(__name__)


class HangWatch:
    """Tells which follower hangs, from looks at the pulses of all ranks."""

    def __init__(self, shape: GroupShape) -> None:
        self._shape = shape
        self._lives = [StallWatch() for _ in range(shape.size)]
        self._steps = [StallWatch() for _ in range(shape.size)]

    def look(self, pulses: Sequence[Pulse]) -> list[int]:
        """Take the pulses of all ranks; the followers of which one hangs, if one does.

        A process that does not run hangs, and so does a follower that is silent in no exchange: it
        waits for nobody. If all ranks are in exchanges, those of a stage that have come further
        wait for the one that has not. Rank 0 is watched by the supervisor.
        """
        followers = range(1, len(pulses))
        ranks = range(len(pulses))
        dead = [self._lives[rank].look(pulses[rank].num_lives, has_work=True) for rank in ranks]
        silent = [self._steps[rank].look(pulses[rank].num_steps, has_work=True) for rank in ranks]
        stuck = [silent[rank] and not pulses[rank].is_exchanging for rank in ranks]
        for found in (dead, stuck):
            if suspects := [rank for rank in followers if found[rank]]:
                return suspects
        if not all(silent) or not pulses[0].is_exchanging:
            return []
        behind = [rank for rank in followers if self._is_behind(rank, pulses)]
        return behind or list(followers)

    def _is_behind(self, rank: int, pulses: Sequence[Pulse]) -> bool:
        """Whether another rank of its stage has come further."""
        size = self._shape.ranks_per_stage
        first = rank // size * size
        return pulses[rank].num_marks < max(each.num_marks for each in pulses[first : first + size])


class RankWatch:
    """Looks at the pulses in a thread of rank 0, which may itself wait for the rank that hangs."""

    def __init__(
        self, pulses: RankPulses, shape: GroupShape, end: Callable[[int, str], None]
    ) -> None:
        """`end`: ends the follower of this rank, for this reason."""
        self._pulses = pulses
        self._shape = shape
        self._end = end
        self._heartbeat: Heartbeat | None = None
        self._is_over = Event()

    def start(self) -> None:
        """Watch from now on: all ranks have opened their pools and take commands."""
        Thread(target=self._run, name="rank-watch", daemon=True).start()

    def report_progress_to(self, heartbeat: Heartbeat) -> None:
        """Beat for rank 0 while it waits for stages that compute: their part of a large step may
        take longer than its supervisor waits."""
        self._heartbeat = heartbeat

    def stop(self) -> None:
        """End the watch."""
        self._is_over.set()

    def _run(self) -> None:
        watch, before = HangWatch(self._shape), self._pulses.read()
        while not self._is_over.wait(HANG_SECONDS / SILENT_LOOKS):
            pulses = self._pulses.read()
            if self._heartbeat and _rank_0_waits(before, pulses):
                self._heartbeat.beat()
            before = pulses
            if ranks := watch.look(pulses):
                _log.error("rank_hangs", extra={"ranks": ranks, "pulses": str(pulses)})
                names = " or ".join(f"rank {rank}" for rank in ranks)
                reason = f"No progress of {names} for {HANG_SECONDS:g} s."
                self._end(ranks[0], reason)
                return


def _rank_0_waits(before: Sequence[Pulse], pulses: Sequence[Pulse]) -> bool:
    """Whether rank 0 is in an exchange while another rank has gone on with its step."""
    steps = zip(before[1:], pulses[1:], strict=True)
    return pulses[0].is_exchanging and any(one.num_marks != two.num_marks for one, two in steps)
