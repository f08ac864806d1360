"""The memory of every rank."""

from __future__ import annotations

from ..messages import RankStats
from ..parts import EngineParts
from ..ranks.rank_memory import RankMemory


class RankReports:
    """The memory of an engine's ranks, each as it has last said."""

    def __init__(self, parts: EngineParts) -> None:
        self._host = parts.tiers.host
        self._followers = parts.group.followers if parts.group else None
        self._own = RankMemory(0, parts.base, parts.tiers.arena, parts.runner.cache)

    def read(self) -> list[RankStats]:
        """In the order of the ranks; empty for an engine of one rank."""
        if self._followers is None:
            return []
        own = self._own.measure(
            host_bytes=self._host.capacity_bytes, host_used_bytes=self._host.used_bytes
        )
        return [own, *self._followers.reports()]
