"""Tokens that rank 0 has sampled and no host has read, for the next step of all ranks.

They do not travel in the command of that step, because rank 0 would have to read them first. At the
beginning of the step, rank 0 broadcasts the ids of the step's first rows. This is done on the
device, in the order of the step's other collectives.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..model.inputs import PendingTokens
from ..shards.rank_sums import RankSums


class SentTokens(NamedTuple):
    """Pending tokens of rank 0."""

    pending: PendingTokens
    ranks: RankSums

    @property
    def sources(self) -> list[int]:
        return self.pending.sources

    def fill(self, input_ids: Tensor, sources: Tensor) -> None:
        """See `PendingTokens.fill`; every follower gets them too."""
        self.pending.fill(input_ids, sources)
        self.ranks.broadcast(input_ids[: len(sources)])


class AwaitedTokens(NamedTuple):
    """Pending tokens of a follower, which come from rank 0."""

    num_rows: int
    """Rows of the step whose tokens rank 0 sends."""
    ranks: RankSums

    @property
    def sources(self) -> list[int]:
        return [-1] * self.num_rows

    def fill(self, input_ids: Tensor, sources: Tensor) -> None:
        """See `PendingTokens.fill`."""
        self.ranks.broadcast(input_ids[: len(sources)])
