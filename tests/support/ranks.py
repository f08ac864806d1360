"""The ranks of a tensor-parallel group as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar
from unittest.mock import patch

from torch._C._distributed_c10d import HashStore

from loraplex.engine.checkpoint.weights import load_weights
from loraplex.engine.config import EngineConfig
from loraplex.engine.model import sharded_base
from loraplex.engine.model.base_model import BaseModel
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


def run_sharded(engine: EngineConfig, size: int, run: Callable[[BaseModel, int], T]) -> list[T]:
    """What `run` returns for each rank's part of a base, and the rank."""
    # transformers' loader changes torch's global state while it builds a model.
    loading = Lock()

    def load_alone(*args: Any, **kwargs: Any) -> Any:
        with loading:
            return load_weights(*args, **kwargs)

    def run_rank(sums: RankSums) -> T:
        return run(sharded_base.load_sharded_base(engine, sums), sums.place.rank)

    with patch.object(sharded_base, "load_weights", load_alone):
        return run_ranks(size, run_rank)
