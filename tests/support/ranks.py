"""The ranks of a tensor-parallel group as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch._C._distributed_c10d import HashStore

from loraplex.engine.shards.rank_place import RankPlace
from loraplex.engine.shards.rank_sums import RankSums, connect_ranks

T = TypeVar("T")


def run_ranks(size: int, run: Callable[[RankSums], T]) -> list[T]:
    """What `run` returns on each rank, in their order."""
    store = HashStore()

    def run_rank(rank: int) -> T:
        return run(connect_ranks(store, RankPlace(rank, size)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_rank, range(size)))
