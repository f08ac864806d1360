"""Sums, largest values and gathers over the ranks of a tensor-parallel group.

A row's result must not depend on the rows beside it. An all-reduce over three or more ranks adds an
element in an order that depends on its place in the message. So the parts are gathered there, and
every rank adds them in the order of the ranks. Two numbers have one sum.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_place import RankPlace
from .rank_pulses import RankPulse, RankPulses

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_WAIT = timedelta(minutes=30)
"""For a rank that reads the base's files. A rank that has died is noticed at once, and one that
hangs by the heartbeat."""
LOOPBACK = "127.0.0.1"


class Work(Protocol):
    """A collective that has begun."""

    def wait(self) -> bool: ...


class _Group(Protocol):
    """What is used of torch's ProcessGroupGloo, whose type stub names none of it."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...


class RankSums:
    """The connections of one rank to all others.

    All ranks must call the same methods in the same order, with tensors of the same shape and
    dtype. Each method raises RuntimeError if another rank has died.
    """

    def __init__(self, group: _Group, place: RankPlace, pulse: RankPulse | None = None) -> None:
        """`pulse`: the rank's signs of life; None: nobody watches."""
        self._group = group
        self.place = place
        self._pulse = pulse or RankPulses(place.size).of(place.rank)

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts. It may be the memory of `part`."""
        if self.place.size == 2:
            whole = part.contiguous()
            with self._pulse.exchanging():
                self._group.allreduce([whole]).wait()
            return whole
        parts = self.gather(part)
        whole = parts[0]
        for other in parts[1:]:
            whole += other
        return whole

    def largest(self, part: Tensor) -> Tensor:
        """The largest of all ranks' values at each place; NaN where one is NaN."""
        return torch.stack(self.gather(part)).amax(dim=0)

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.place.size)]
        with self._pulse.exchanging():
            self._group.allgather([parts], [own]).wait()
        return parts


def connect_ranks(
    store: Store, place: RankPlace, pulse: RankPulse | None = None, *, host: str = LOOPBACK
) -> RankSums:
    """Connect this rank to the others of its stage. Waits for all of them.

    `pulse`: see `RankSums`. `host`: see `open_gloo`.
    """
    ranks = RankSums(open_gloo(store, place.rank, place.size, host), place, pulse)
    ranks.gather(torch.zeros(1))  # no rank reads the store after this
    return ranks


def open_gloo(store: Store, rank: int, size: int, host: str) -> Any:
    """A process group. `host`: the numeric address of this rank's interface to the others."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = LONGEST_WAIT
    return gloo(store, rank, size, options)
