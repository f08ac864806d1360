"""Starts the group of ranks that serves one base, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from ..config import EngineConfig
from ..errors import UnsupportedModel
from ..shards.group_links import GroupLinks, connect_group
from ..shards.rank_pulses import RankPulses
from ..shards.rank_sums import open_store
from .followers import Followers
from .rank_devices import choose_rank_device, rank_environment
from .rank_pipe import LeaderPipe, leader_pipe
from .rank_watch import RankWatch

_COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.ranks.main")
_STDERR = 2
_END_SECONDS = 5.0
_DUMP_SECONDS = 0.5


class RankGroup(NamedTuple):
    """A group of ranks, as rank 0 has it."""

    links: GroupLinks
    followers: Followers
    watch: RankWatch
    """Not started."""


def open_group(config: EngineConfig) -> RankGroup:
    """Start the followers and connect all ranks.

    Raises RankLost if one ends meanwhile, UnsupportedModel if this PyTorch cannot connect them,
    InvalidParameter if there are fewer devices than ranks.
    """
    if not dist.is_available():
        raise UnsupportedModel("a group of ranks needs a PyTorch with torch.distributed")
    device = choose_rank_device(config)
    shape = config.group_shape
    processes: list[subprocess.Popen[bytes]] = []

    def close() -> None:
        watch.stop()
        _end(processes)

    def end(rank: int, reason: str) -> None:
        followers.lose(rank, reason)
        _dump_and_kill(processes[rank - 1])

    # A file without a name: it ends with the processes, however they end.
    with (
        tempfile.TemporaryFile() as store,
        tempfile.TemporaryFile() as beats,
        ExitStack() as on_failure,
    ):
        on_failure.callback(_end, processes)
        beats.truncate(RankPulses.num_bytes(shape.size))
        pulses = RankPulses(shape.size, beats.fileno())
        watch = RankWatch(pulses, shape, end)
        files = (store.fileno(), beats.fileno())
        pipes = [
            _start(config, rank, rank_environment(device, rank), files, processes)
            for rank in range(1, shape.size)
        ]
        followers = Followers(pipes, close)
        followers.await_joined()
        links = connect_group(open_store(store.fileno(), shape.size), shape, 0, device, pulses)
        if device.type == "cuda":
            followers.on_lost(links.sums.abort)
        on_failure.pop_all()
    return RankGroup(links, followers, watch)


def _start(
    config: EngineConfig,
    rank: int,
    variables: Mapping[str, str],
    files: tuple[int, int],
    processes: list[subprocess.Popen[bytes]],
) -> LeaderPipe:
    """Start one follower; its standard input ends with this process. `variables`: of its
    environment, in addition to this process's."""
    ours: Connection[bytes, bytes]
    theirs: Connection[bytes, bytes]
    ours, theirs = Pipe()
    arguments = map(str, (theirs.fileno(), rank, *files))
    processes.append(
        subprocess.Popen(
            [*_COMMAND, *arguments, msgspec.json.encode(config).decode()],
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            env={
                **os.environ,
                **variables,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            pass_fds=[theirs.fileno(), *files],
        )
    )
    theirs.close()
    return leader_pipe(ours)


def _dump_and_kill(process: subprocess.Popen[bytes]) -> None:
    """Let it print its stacks, if it still can, and end it: the others wait for it no longer."""
    process.send_signal(signal.SIGUSR1)
    time.sleep(_DUMP_SECONDS)
    process.kill()


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
