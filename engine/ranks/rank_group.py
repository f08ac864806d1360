"""Opens the group of ranks that serves one base: starts those of this host, awaits the others."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..config import EngineConfig
from ..errors import InvalidParameter, RankLost, UnsupportedModel
from ..shards.group_links import GroupLinks, connect_group
from ..shards.rank_address import LOOPBACK, RankAddress, parse_rank_address
from .file_sender import FileSender
from .followers import Followers
from .group_secret import random_secret, secret_of_file
from .rank_devices import choose_rank_device, rank_environment
from .rank_handshake import Purpose, RankLink
from .rank_listener import RankListener
from .rank_pipe import leader_pipe
from .rank_process import FilesFrom, RankProcess, dump_and_kill, end_ranks, start_rank
from .rank_watch import RankWatch


class RankGroup(NamedTuple):
    """A group of ranks, as rank 0 has it."""

    links: GroupLinks
    followers: Followers
    watch: RankWatch
    """Not started."""
    hosts: Sequence[str]
    """The names of the ranks' hosts, by rank."""

    @property
    def num_ranks_here(self) -> int:
        """The ranks on rank 0's host."""
        return self.hosts.count(self.hosts[0])

    @property
    def most_ranks_on_a_host(self) -> int:
        return max(map(self.hosts.count, self.hosts))


def open_group(config: EngineConfig) -> RankGroup:
    """Start the followers of this host, await those of other hosts, and connect all ranks.

    Raises RankLost if one ends meanwhile or does not join, InvalidParameter if the group's secret
    or address cannot be used or there are fewer devices than ranks, UnsupportedModel if this
    PyTorch cannot connect the ranks.
    """
    if not dist.is_available():
        raise UnsupportedModel("a group of ranks needs a PyTorch with torch.distributed")
    from .rank_store import RankStore

    device = choose_rank_device(config)
    processes: list[RankProcess] = []

    def close() -> None:
        watch.stop()
        end_ranks(processes)

    def end(rank: int, reason: str) -> None:
        followers.lose(rank, reason)
        if rank <= len(processes):
            dump_and_kill(processes[rank - 1])
            return
        followers.hang_up(rank)
        links.abort()  # its connections may stay open: rank 0 must not wait for it

    with ExitStack() as on_failure:
        on_failure.callback(end_ranks, processes)
        address, joined = _join_followers(config, device, processes)
        followers = _open_followers(joined, close)
        watch = RankWatch(followers.pulses, config.group_shape, end)
        on_failure.callback(followers.close)
        followers.await_joined()
        hosts = (socket.gethostname(), *followers.hosts)
        followers.start(config, hosts[0])
        store, shape = RankStore(followers.values), config.group_shape
        links = connect_group(store, shape, 0, device, followers.pulses, host=address.host)
        if device.type == "cuda":
            followers.on_lost(links.sums.abort)
        on_failure.pop_all()
    return RankGroup(links, followers, watch, hosts)


def _join_followers(
    config: EngineConfig, device: torch.device, processes: list[RankProcess]
) -> tuple[RankAddress, dict[RankLink, socket.socket]]:
    """Start those of this host and let all join; where they did, and their connections.

    `processes`: takes those that are started, which are the first ranks.
    """
    num_local = config.num_local_ranks or config.num_ranks
    secret = random_secret() if config.rank_secret is None else secret_of_file(config.rank_secret)
    wanted = [RankLink(rank, Purpose.COMMANDS) for rank in range(1, config.num_ranks)]
    wanted += [RankLink(rank, Purpose.FILES) for rank in range(num_local, config.num_ranks)]
    path = os.pathsep.join(filter(None, sys.path))
    with _open_listener(config, secret, wanted) as listener:
        for rank in range(1, num_local):
            environment = {**os.environ, **rank_environment(device, rank), "PYTHONPATH": path}
            processes.append(
                start_rank(listener.address, secret, rank, FilesFrom.DISK, environment)
            )
        return listener.address, listener.admit_all(check=partial(_check, processes))


def _open_listener(config: EngineConfig, secret: bytes, wanted: Sequence[RankLink]) -> RankListener:
    address = LOOPBACK
    if config.rank_address is not None:
        address = parse_rank_address(config.rank_address, "rank_address")
    try:
        return RankListener(address, secret, wanted)
    except OSError as exc:
        raise InvalidParameter("rank_address", f"cannot listen at {address}: {exc}") from exc


def _open_followers(
    joined: Mapping[RankLink, socket.socket], close: Callable[[], None]
) -> Followers:
    connections = {link: Connection(each.detach()) for link, each in joined.items()}
    ordered = sorted(connections)

    def lose(rank: int) -> None:
        followers.lose(rank, f"The connection to rank {rank} has ended.")

    senders = [
        FileSender(connections[link], partial(lose, link.rank))
        for link in ordered
        if link.purpose is Purpose.FILES
    ]
    pipes = [leader_pipe(connections[link]) for link in ordered if link.purpose is Purpose.COMMANDS]
    followers = Followers(pipes, close, senders)
    return followers


def _check(processes: Sequence[RankProcess]) -> None:
    """Raises RankLost if a process has ended."""
    for rank, process in enumerate(processes, 1):
        if process.poll() is not None:
            raise RankLost(f"Rank {rank} ended before it had started.")
