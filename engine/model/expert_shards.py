"""One rank's experts of each layer, and how the ranks' results become whole.

A rank holds some of a layer's experts, each whole, and their adapters. All ranks have all tokens
and choose experts alike, because every rank holds the router. A rank computes the tokens that were
routed to its own experts, and the results of all ranks are added.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..shards.rank_sums import RankSums


class ExpertShards:
    """Divides a base's experts for one rank."""

    def __init__(self, held: Mapping[str, range], ranks: RankSums) -> None:
        """`held`: the rank's experts, by the path of their module."""
        self._held = held
        self._ranks = ranks

    def held(self, path: str) -> range:
        """The rank's experts of the module at this path."""
        return self._held[path]

    def whole(self, y: Tensor) -> Tensor:
        """The result of all experts `[n, hidden]`, of this rank's result for the same tokens."""
        return self._ranks.add(y)
