"""Sums, largest values and gathers over the ranks of a tensor-parallel group.

A row's result must not depend on the rows beside it. An all-reduce over three or more ranks adds an
element in an order that depends on its place in the message. So the parts are gathered there, and
every rank adds them in the order of the ranks. Two numbers have one sum.

gloo connects ranks on the CPU, NCCL ranks on CUDA. With NCCL no method waits for the device, so a
CUDA graph can contain them.
"""

from __future__ import annotations

import os
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
_LOOPBACK = "127.0.0.1"


class Work(Protocol):
    """A collective that has begun."""

    def wait(self) -> bool: ...


class _Group(Protocol):
    """What is used of torch's ProcessGroupGloo and ProcessGroupNCCL."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int) -> Work: ...

    def abort(self) -> None: ...


class RankSums:
    """The connections of one rank to all others.

    All ranks must call the same methods in the same order, with tensors of the same shape and
    dtype, on the device of the group. On the CPU each method raises RuntimeError if another rank
    has died. On CUDA it starts the exchange in the order of the current stream; if a rank has died,
    the device waits until `abort`.
    """

    def __init__(
        self,
        group: _Group,
        place: RankPlace,
        device: torch.device,
        pulse: RankPulse | None = None,
    ) -> None:
        """`device`: of all tensors. `pulse`: the rank's signs of life; None: nobody watches."""
        self._group = group
        self.place = place
        self.device = device
        self._pulse = pulse or RankPulses(place.size).of(place.rank)

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts. It may be the memory of `part`."""
        if self.place.size == 2:
            whole = part.contiguous()
            with self._pulse.exchanging():
                self._group.allreduce([whole]).wait()
            return whole
        first, *others = self.gather(part)
        if not others:
            return first
        whole = first + others[0]
        for other in others[1:]:
            whole += other
        return whole

    def largest(self, part: Tensor) -> Tensor:
        """The largest of all ranks' values at each place; NaN where one is NaN."""
        return torch.stack(self.gather(part)).amax(dim=0)

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        own = part.flatten()
        parts = own.new_empty(self.place.size * len(own))
        with self._pulse.exchanging():
            self._group._allgather_base(parts, own).wait()
        return list(parts.view(self.place.size, *part.shape).unbind())

    def broadcast(self, values: Tensor) -> None:
        """Write the first rank's values into those of all others; `values`: contiguous."""
        with self._pulse.exchanging():
            self._group.broadcast(values, 0).wait()

    def warm_up(self) -> None:
        """Do every exchange once, and wait for it. NCCL connects the ranks meanwhile, which must
        not happen while a graph is captured."""
        values = torch.zeros(1, device=self.device)
        self.broadcast(values)
        self.largest(self.add(values)).item()

    def abort(self) -> None:
        """End the exchanges in flight, whose results mean nothing then."""
        self._group.abort()


def open_store(descriptor: int, size: int) -> Store:
    """The store in an open file, through which `size` ranks find each other."""
    from torch._C._distributed_c10d import FileStore  # not every PyTorch has it

    # The store opens its path again when it is destroyed: the descriptor stays open until the
    # process ends, or another file would have its number then.
    return FileStore(f"/dev/fd/{os.dup(descriptor)}", size)


def connect_ranks(
    store: Store, place: RankPlace, device: torch.device, pulse: RankPulse | None = None
) -> RankSums:
    """Connect this rank to the others of its stage, on one machine. Waits for all of them.

    `device`, `pulse`: see `RankSums`.
    """
    open_group = open_nccl if device.type == "cuda" else open_gloo
    ranks = RankSums(open_group(store, place.rank, place.size), place, device, pulse)
    ranks.warm_up()  # gloo does not read the store after this
    return ranks


def open_gloo(store: Store, rank: int, size: int) -> Any:
    """A process group whose ranks talk over the loopback interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = LONGEST_WAIT
    return gloo(store, rank, size, options)


def open_nccl(store: Store, rank: int, size: int) -> Any:
    """A process group whose ranks have a CUDA device each, the current one of their process."""
    # NCCL finds the other ranks over this interface and would take any; then it uses NVLink, PCIe
    # or shared memory.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = LONGEST_WAIT
    return nccl(store, rank, size, options)
