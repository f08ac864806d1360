"""What one rank holds in memory."""

from __future__ import annotations

import os
import socket

from ...adapters.arena import Arena
from ..kv.cache import KvCache
from ..messages import RankStats
from ..model.base_model import BaseModel


class RankMemory:
    """Measures one rank."""

    def __init__(self, rank: int, base: BaseModel, arena: Arena, cache: KvCache) -> None:
        self._rank = rank
        self._arena, self._cache = arena, cache
        self._stage = base.stages.place.stage
        self._weight_bytes = base.weight_bytes

    def measure(self, *, host_bytes: int, host_used_bytes: int) -> RankStats:
        """The memory now. The arguments: size and use of the adapters' host memory."""
        return RankStats(
            self._rank,
            resident_bytes=_resident_bytes(),
            weight_bytes=self._weight_bytes,
            kv_bytes=self._cache.num_bytes,
            arena_bytes=self._arena.capacity_bytes,
            arena_used_bytes=sum(self._arena.row_bytes.values()),
            host_bytes=host_bytes,
            host_used_bytes=host_used_bytes,
            stage=self._stage,
            host=socket.gethostname(),
        )


def _resident_bytes() -> int:
    """Of this process; tensor parallelism is served under Linux."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
