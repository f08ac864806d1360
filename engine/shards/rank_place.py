"""The place of one process in a group of ranks. Torch-free.

Each stage of a group has a part of the layers, and each rank of a stage a part of each of them.
Rank 0 schedules and samples, so it is of the last stage, which computes the logits.
"""

from __future__ import annotations

from typing import NamedTuple


class RankPlace(NamedTuple):
    """One rank of a stage. The first adds the biases behind a sum."""

    rank: int
    size: int
    """The number of ranks of the stage."""


ALONE = RankPlace(0, 1)
"""An engine without tensor parallelism."""


class StagePlace(NamedTuple):
    """One stage of a pipeline."""

    stage: int
    """In the order in which a token passes the stages."""
    num_stages: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


class GroupShape(NamedTuple):
    """How many ranks a group has."""

    ranks_per_stage: int
    num_stages: int

    @property
    def size(self) -> int:
        return self.ranks_per_stage * self.num_stages

    def place(self, rank: int) -> RankPlace:
        """The place in its stage of a rank of the group."""
        return RankPlace(rank % self.ranks_per_stage, self.ranks_per_stage)

    def stage(self, rank: int) -> StagePlace:
        """The stage of a rank of the group."""
        return StagePlace(self.num_stages - 1 - rank // self.ranks_per_stage, self.num_stages)
