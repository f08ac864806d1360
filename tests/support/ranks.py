"""The ranks of a tensor-parallel group as threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Pipe
from threading import Lock, Thread
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import HashStore

from loraplex.engine import parts
from loraplex.engine.checkpoint.weights import load_weights
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineError
from loraplex.engine.model import sharded_base
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.ranks import follower
from loraplex.engine.ranks.adapter_files import LocalFiles
from loraplex.engine.ranks.commands import Joined
from loraplex.engine.ranks.follower import Follower
from loraplex.engine.ranks.followers import Followers
from loraplex.engine.ranks.pulse_reports import reporting_pulse
from loraplex.engine.ranks.rank_group import RankGroup
from loraplex.engine.ranks.rank_pipe import FollowerPipe, follower_pipe, leader_pipe
from loraplex.engine.ranks.rank_watch import RankWatch
from loraplex.engine.shards.group_links import GroupLinks, connect_group
from loraplex.engine.shards.rank_place import GroupShape, RankPlace
from loraplex.engine.shards.rank_pulses import RankPulses
from loraplex.engine.shards.rank_sums import RankSums, connect_ranks

T = TypeVar("T")
CPU = torch.device("cpu")


def run_ranks(size: int, run: Callable[[RankSums], T]) -> list[T]:
    """What `run` returns on each rank, in their order."""
    store = HashStore()

    def run_rank(rank: int) -> T:
        return run(connect_ranks(store, RankPlace(rank, size), CPU))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_rank, range(size)))


def run_group(shape: GroupShape, run: Callable[[GroupLinks, int], T]) -> list[T]:
    """What `run` returns for each rank's connections, and the rank."""
    store = HashStore()

    def run_rank(rank: int) -> T:
        links = connect_group(store, shape, rank, CPU)
        try:
            result = run(links, rank)
            if links.stages:
                links.stages.tell_all(b"")  # nobody leaves before all have received
            return result
        except BaseException:
            links.abort()
            raise

    with ThreadPoolExecutor(shape.size) as threads:
        return list(threads.map(run_rank, range(shape.size)))


def run_sharded(
    engine: EngineConfig, size: int, run: Callable[[BaseModel, int], T], *, num_stages: int = 1
) -> list[T]:
    """What `run` returns for each rank's part of a base, and the rank. `size`: the ranks of each
    stage."""

    def run_rank(links: GroupLinks, rank: int) -> T:
        return run(sharded_base.load_sharded_base(engine, links), rank)

    with loading_in_threads():
        return run_group(GroupShape(size, num_stages), run_rank)


@contextmanager
def loading_in_threads() -> Iterator[None]:
    """Threads share what ranks, which are processes, have of their own.

    transformers' loader changes torch's global state while it builds a model. Fusing layers
    replaces a function of transformers' modules for a trial of all ranks: it is left out.
    """
    loading = Lock()

    def load_alone(*args: Any, **kwargs: Any) -> Any:
        with loading:
            return load_weights(*args, **kwargs)

    with (
        patch.object(sharded_base, "load_weights", load_alone),
        patch.object(sharded_base, "fuses_layers", lambda device: False),
    ):
        yield


@contextmanager
def followers_as_threads() -> Iterator[list[Follower]]:
    """Engines that are opened here have followers that are threads. Yields these, by rank."""
    states: list[Follower] = []

    class Recorded(Follower):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            states.append(self)

    def open_thread_group(config: EngineConfig) -> RankGroup:
        store, shape = HashStore(), config.group_shape
        pipes, threads = [], []
        for rank in range(1, shape.size):
            ours, theirs = Pipe()
            pipe = follower_pipe(theirs)
            threads.append(Thread(target=_follow, args=(config, store, rank, pipe)))
            pipes.append(leader_pipe(ours))
            threads[-1].start()

        def join() -> None:
            watch.stop()
            for thread in threads:
                thread.join()

        followers = Followers(pipes, join)
        watch = RankWatch(followers.pulses, shape, followers.lose)
        followers.await_joined()
        hosts = ["here"] * shape.size
        links = connect_group(store, shape, 0, CPU, followers.pulses)
        return RankGroup(links, followers, watch, hosts)

    with (
        loading_in_threads(),
        patch.object(parts, "open_group", open_thread_group),
        patch.object(follower, "Follower", Recorded),
    ):
        yield states


def _follow(config: EngineConfig, store: HashStore, rank: int, pipe: FollowerPipe) -> None:
    pipe.send(Joined("here"))
    pulses = RankPulses(config.group_shape.size)
    links = connect_group(store, config.group_shape, rank, CPU, pulses)
    try:
        with reporting_pulse(pulses.of(rank), pipe, on_lost=lambda: None):
            follower.follow(config, links, pipe, rank, LocalFiles())
    except (EngineError, RuntimeError):  # rank 0 meets the same, or has ended
        links.abort()
    finally:
        pipe.close()
