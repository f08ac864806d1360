"""The observations of a step's attention, as commands, and what a follower keeps of them.

Each rank decides for its own KV heads which tokens stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..execution.evictions import Compaction, Mass, Observation
from ..kv.sequence_blocks import BlockTable
from .commands import Compacted, Observed


class AttentionMasses:
    """By request the attention that its cached tokens received from this rank's heads."""

    def __init__(self) -> None:
        self._masses: dict[str, Mass] = {}

    def observations(self, observed: Iterable[Observed]) -> list[Observation]:
        """The observations that a step has to make."""
        return [_observation(each, self._before(each)) for each in observed]

    def keep(self, observations: Sequence[Observation]) -> None:
        """Keep what is of use after a step."""
        for observation in observations:
            self._masses.pop(observation.request_id, None)
            if observation.after:
                self._masses[observation.request_id] = observation.after

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the masses of these requests."""
        for request_id in request_ids:
            self._masses.pop(request_id, None)

    def __len__(self) -> int:
        """Requests of which something is kept."""
        return len(self._masses)

    def _before(self, observed: Observed) -> Mass:
        return self._masses[observed.request_id] if observed.is_continued else {}


def observed_command(observation: Observation) -> Observed:
    """What a follower needs of an observation."""
    rows = observation.rows
    return Observed(
        observation.request_id,
        (rows.start, rows.stop),
        observation.first_place,
        observation.num_cached,
        observation.table.tobytes(),
        is_continued=bool(observation.before),
        is_last=observation.is_last,
        compaction=_compacted(observation.compaction),
    )


def _compacted(compaction: Compaction | None) -> Compacted | None:
    if compaction is None:
        return None
    target, budget, num_recent, pool_width = compaction
    return Compacted(target.tobytes(), budget, num_recent, pool_width)


def _observation(observed: Observed, before: Mass) -> Observation:
    return Observation(
        observed.request_id,
        rows=slice(*observed.rows),
        first_place=observed.first_place,
        num_cached=observed.num_cached,
        table=_table(observed.table),
        before=before,
        is_last=observed.is_last,
        compaction=_compaction(observed.compaction),
    )


def _compaction(compacted: Compacted | None) -> Compaction | None:
    if compacted is None:
        return None
    target = _table(compacted.target)
    return Compaction(target, compacted.budget, compacted.num_recent, compacted.pool_width)


def _table(packed: bytes) -> BlockTable:
    return np.frombuffer(packed, dtype=np.int64)
