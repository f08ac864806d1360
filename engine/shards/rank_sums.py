"""Sums, largest values and gathers over the ranks of a tensor-parallel group.

A row's result must not depend on the rows beside it. An all-reduce over three or more ranks adds an
element in an order that depends on its place in the message. So the parts are gathered there, and
every rank adds them in the order of the ranks. Two numbers have one sum. Of a large message each
rank adds one part, and the sums are gathered ("two-shot"): a rank then receives 2 (t - 1) / t times
the message's bytes instead of t - 1 times, in one exchange more.

gloo connects ranks on the CPU, NCCL ranks on CUDA. With NCCL no method waits for the device, so a
CUDA graph can contain them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .rank_place import RankPlace
from .rank_pulses import RankPulse, RankPulses

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LONGEST_WAIT = timedelta(minutes=30)
"""For a rank that reads the base's files. A rank that has died is noticed at once, and one that
hangs by the heartbeat."""
TWO_SHOT_BYTES = 1 << 20
"""From this size on, sums are added in parts; measured over gloo with 3, 4 and 8 ranks by `make
bench-rank-sums`."""
LOOPBACK = "127.0.0.1"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


class Work(Protocol):
    """A collective that has begun."""

    def wait(self) -> bool: ...


class _Group(Protocol):
    """What is used of torch's ProcessGroupGloo and ProcessGroupNCCL."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work: ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int) -> Work: ...

    def abort(self) -> None: ...

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...


class RankSums:
    """The connections of one rank to all others.

    All ranks must call the same methods in the same order, with tensors of the same dtype and, but
    for `collect`, of the same shape, on the device of the group. On the CPU each method raises
    RuntimeError if another rank has died. On CUDA it starts the exchange in the order of the
    current stream; if a rank has died, the device waits until `abort`.
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
        if self.place.size > 2 and part.nbytes >= TWO_SHOT_BYTES:
            return self.add_in_parts(part)
        return self.add_gathered(part)

    def add_gathered(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, each rank adding all of it."""
        return _added(self.gather(part))

    def add_in_parts(self, part: Tensor) -> Tensor:
        """The same sum, bit for bit, each rank adding as much of it."""
        own, size = part.flatten(), self.place.size
        num_each = -(-len(own) // size)
        own = F.pad(own, (0, size * num_each - len(own)))
        received = torch.empty_like(own)
        with self._pulse.exchanging():
            self._group.alltoall_base(received, own, [], []).wait()
        sums = self._gather(_added(received.view(size, num_each).unbind()))
        return sums[: part.numel()].view(part.shape)

    def largest(self, part: Tensor) -> Tensor:
        """The largest of all ranks' values at each place; NaN where one is NaN."""
        return torch.stack(self.gather(part)).amax(dim=0)

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        parts = self._gather(part.flatten())
        return list(parts.view(self.place.size, *part.shape).unbind())

    def _gather(self, own: Tensor) -> Tensor:
        """The vectors of all ranks one behind the other, in the order of the ranks."""
        whole = own.new_empty(self.place.size * len(own))
        with self._pulse.exchanging():
            self._group._allgather_base(whole, own).wait()
        return whole

    def collect(self, part: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """On the first rank the parts `[..., widths[rank]]` of all ranks, in their order; on the
        others nothing: they have sent theirs."""
        own = part.contiguous()
        with self._pulse.exchanging():
            if self.place.rank:
                self._group.send([own], 0, 0).wait()
                return []
            parts = [own, *(own.new_empty(*own.shape[:-1], width) for width in widths[1:])]
            received = [self._group.recv([parts[rank]], rank, 0) for rank in range(1, len(parts))]
            for work in received:
                work.wait()
        return parts

    def broadcast(self, values: Tensor) -> None:
        """Write the first rank's values into those of all others; `values`: contiguous."""
        with self._pulse.exchanging():
            self._group.broadcast(values, 0).wait()

    def warm_up(self) -> None:
        """Do every exchange once, and wait for it. NCCL connects the ranks meanwhile, which must
        not happen while a graph is captured."""
        values = torch.zeros(1, device=self.device, dtype=torch.float32)
        self.broadcast(values)
        self.largest(self.add_in_parts(self.add(values))).item()

    def abort(self) -> None:
        """End the exchanges in flight, whose results mean nothing then."""
        self._group.abort()


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum, in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0] + parts[1]
    for other in parts[2:]:
        whole += other
    return whole


def connect_ranks(
    store: Store,
    place: RankPlace,
    device: torch.device,
    pulse: RankPulse | None = None,
    *,
    host: str = LOOPBACK,
) -> RankSums:
    """Connect this rank to the others of its stage. Waits for all of them.

    `device`, `pulse`: see `RankSums`. `host`: see `open_gloo`.
    """
    if device.type == "cuda":
        with _nccl_over_loopback():
            ranks = RankSums(open_nccl(store, place.rank, place.size), place, device, pulse)
            ranks.warm_up()
        return ranks
    ranks = RankSums(open_gloo(store, place.rank, place.size, host), place, device, pulse)
    ranks.warm_up()  # gloo does not read the store after this
    return ranks


def open_gloo(store: Store, rank: int, size: int, host: str) -> Any:
    """A process group. `host`: the numeric address of this rank's interface to the others."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = LONGEST_WAIT
    return gloo(store, rank, size, options)


def open_nccl(store: Store, rank: int, size: int) -> Any:
    """A process group whose ranks have a CUDA device each, the current one of their process."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = LONGEST_WAIT
    return nccl(store, rank, size, options)


@contextmanager
def _nccl_over_loopback() -> Iterator[None]:
    """Within the context, NCCL finds the other ranks over the loopback interface, unless the
    operator has named another; it would take any. Then it uses NVLink, PCIe or shared memory.

    It reads the variable when it connects the first ranks, and keeps the interface for the life of
    the process. So the variable can be removed: processes that are started later do not inherit it.
    """
    if _NCCL_INTERFACE in os.environ:
        yield
        return
    os.environ[_NCCL_INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[_NCCL_INTERFACE]
