"""Starts the group of ranks that serves one base, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from ..config import EngineConfig
from ..errors import UnsupportedModel
from ..shards.rank_place import RankPlace
from ..shards.rank_sums import RankSums, connect_ranks, open_store
from .followers import Followers
from .rank_pipe import LeaderPipe, leader_pipe

_COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.ranks.main")
_END_SECONDS = 5.0


class RankGroup(NamedTuple):
    """A group of ranks, as rank 0 has it."""

    ranks: RankSums
    followers: Followers


def open_group(config: EngineConfig) -> RankGroup:
    """Start the followers and connect all ranks.

    Raises RankLost if one ends meanwhile, UnsupportedModel if this PyTorch cannot connect them.
    """
    if not dist.is_available():
        raise UnsupportedModel("tensor parallelism needs a PyTorch with torch.distributed")
    size = config.tensor_parallel_size
    processes: list[subprocess.Popen[bytes]] = []
    # A file without a name: it ends with the processes, however they end.
    with tempfile.TemporaryFile() as store, ExitStack() as on_failure:
        on_failure.callback(_end, processes)
        pipes = [_start(config, rank, store.fileno(), processes) for rank in range(1, size)]
        followers = Followers(pipes, lambda: _end(processes))
        followers.await_joined()
        ranks = connect_ranks(open_store(store.fileno(), size), RankPlace(0, size))
        on_failure.pop_all()
    return RankGroup(ranks, followers)


def _start(
    config: EngineConfig, rank: int, store: int, processes: list[subprocess.Popen[bytes]]
) -> LeaderPipe:
    """Start one follower; its standard input ends with this process."""
    ours: Connection[bytes, bytes]
    theirs: Connection[bytes, bytes]
    ours, theirs = Pipe()
    arguments = (str(theirs.fileno()), str(rank), str(store))
    processes.append(
        subprocess.Popen(
            [*_COMMAND, *arguments, msgspec.json.encode(config).decode()],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno(), store],
        )
    )
    theirs.close()
    return leader_pipe(ours)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the followers, by force if they do not react."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
