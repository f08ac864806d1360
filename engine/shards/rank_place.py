"""The place of one process in a tensor-parallel group."""

from __future__ import annotations

from typing import NamedTuple


class RankPlace(NamedTuple):
    """One rank of a group. Rank 0 is the engine that schedules and samples."""

    rank: int
    size: int
    """The number of ranks."""


ALONE = RankPlace(0, 1)
"""An engine without tensor parallelism."""
