"""Connects one rank to the others of its group."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from .rank_place import GroupShape
from .rank_pulses import RankPulse, RankPulses
from .rank_sums import LOOPBACK, RankSums, connect_ranks, open_gloo
from .stage_links import StageLinks

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


class GroupLinks(NamedTuple):
    """The connections of one rank."""

    sums: RankSums
    """To the ranks of its stage."""
    stages: StageLinks | None
    """To the other stages; None: there is one stage."""
    pulse: RankPulse
    """Its signs of life."""
    store: Store
    """Through which the ranks have found each other: a process group needs it for its life."""
    sockets: frozenset[int]
    """The descriptors of the connections."""

    def abort(self) -> None:
        """End the connections: whoever waits in an exchange with this rank, and this rank itself,
        gets a RuntimeError. gloo's own `abort` does nothing."""
        for descriptor in self.sockets:
            with (
                suppress(OSError),  # the other end may be gone, or this one closed
                socket.socket(fileno=os.dup(descriptor)) as duplicate,
            ):
                duplicate.shutdown(socket.SHUT_RDWR)


def connect_group(
    store: Store,
    shape: GroupShape,
    rank: int,
    device: torch.device,
    pulses: RankPulses | None = None,
    *,
    host: str = LOOPBACK,
) -> GroupLinks:
    """Connect this rank to the others. Waits for all of them. Meanwhile the process opens no other
    sockets.

    `device`: of this rank; the CPU if there are several stages or hosts. `pulses`: where this
    rank's signs of life are counted; None: nobody watches. `host`: see `open_gloo`.
    """
    before = _connected_sockets()
    pulse = (pulses or RankPulses(shape.size)).of(rank)
    if shape.num_stages == 1:
        sums = connect_ranks(store, shape.place(rank), device, pulse, host=host)
        return GroupLinks(sums, None, pulse, store, _connected_sockets() - before)
    from torch._C._distributed_c10d import PrefixStore  # not every PyTorch has it

    own = PrefixStore(f"stage{shape.stage(rank).stage}", store)
    sums = connect_ranks(own, shape.place(rank), device, pulse, host=host)
    group = open_gloo(PrefixStore("stages", store), rank, shape.size, host)
    stages = StageLinks(group, shape, rank, pulse)
    stages.tell_all(b"")  # no rank reads the store after this
    return GroupLinks(sums, stages, pulse, store, _connected_sockets() - before)


def _connected_sockets() -> frozenset[int]:
    """The descriptors of this process's TCP connections; ranks are served under Linux."""
    return frozenset(filter(_is_connection, map(int, os.listdir("/proc/self/fd"))))


def _is_connection(descriptor: int) -> bool:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            duplicate.getpeername()
            return duplicate.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # a listener, or closed meanwhile
        return False
