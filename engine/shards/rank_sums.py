"""Sums and gathers over the ranks of a tensor-parallel group.

A row's result must not depend on the rows beside it. An all-reduce over three or more ranks adds an
element in an order that depends on its place in the message. So the parts are gathered there, and
every rank adds them in the order of the ranks. Two numbers have one sum.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_place import RankPlace
from .rank_pulses import RankPulses

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_WAIT = timedelta(minutes=30)
"""For a rank that reads the base's files. A rank that has died is noticed at once, and one that
hangs by the heartbeat."""
_LOOPBACK = "127.0.0.1"


class _Work(Protocol):
    """A collective that has begun."""

    def wait(self) -> bool: ...


class _Group(Protocol):
    """What is used of torch's ProcessGroupGloo, whose type stub names none of it."""

    def allreduce(self, tensors: list[Tensor]) -> _Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Work: ...


class RankSums:
    """The connections of one rank to all others.

    All ranks must call the same methods in the same order, with tensors of the same shape and
    dtype. Each method raises RuntimeError if another rank has died.
    """

    def __init__(self, group: _Group, place: RankPlace, pulses: RankPulses | None = None) -> None:
        """`pulses`: the signs of life that the group shares; None: nobody watches."""
        self._group = group
        self.place = place
        self._pulses = pulses or RankPulses(place.size)

    def beat(self) -> None:
        """Show that this rank, which is in no exchange, does not hang."""
        self._pulses.beat(self.place.rank)

    def living(self) -> AbstractContextManager[None]:
        """See `RankPulses.living`."""
        return self._pulses.living(self.place.rank)

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts. It may be the memory of `part`."""
        if self.place.size == 2:
            whole = part.contiguous()
            with self._pulses.exchanging(self.place.rank):
                self._group.allreduce([whole]).wait()
            return whole
        parts = self.gather(part)
        whole = parts[0]
        for other in parts[1:]:
            whole += other
        return whole

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.place.size)]
        with self._pulses.exchanging(self.place.rank):
            self._group.allgather([parts], [own]).wait()
        return parts


def open_store(descriptor: int, size: int) -> Store:
    """The store in an open file, through which `size` ranks find each other."""
    from torch._C._distributed_c10d import FileStore  # not every PyTorch has it

    return FileStore(f"/dev/fd/{descriptor}", size)


def connect_ranks(store: Store, place: RankPlace, pulses: RankPulses | None = None) -> RankSums:
    """Connect this rank to the others, over the loopback interface. Waits for all of them.

    `pulses`: see `RankSums`.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = LONGEST_WAIT
    ranks = RankSums(gloo(store, place.rank, place.size, options), place, pulses)
    ranks.gather(torch.zeros(1))  # no rank reads the store after this
    return ranks
