"""The connections between the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from .rank_place import GroupShape, StagePlace
from .rank_pulses import RankPulse

if TYPE_CHECKING:
    from .rank_sums import Work


T = TypeVar("T")


class _Group(Protocol):
    """What is used of torch's ProcessGroupGloo, whose type stub names none of it."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...


class StageLinks:
    """The connections of one rank to the stages beside its own.

    A rank exchanges hidden states with the ranks that have its place in the other stages. Each
    method raises RuntimeError if the other rank has died.
    """

    def __init__(self, group: _Group, shape: GroupShape, rank: int, pulse: RankPulse) -> None:
        """`group`: all ranks of all stages. `rank`: this one's among them. `pulse`: its signs of
        life."""
        self.place: StagePlace = shape.stage(rank)
        self._group = group
        self._shape = shape
        self._rank = rank
        self._pulse = pulse
        self._sent: tuple[Work, Tensor] | None = None

    def receive(self, like: Tensor) -> Tensor:
        """The hidden states that the stage before has sent, of this shape and dtype."""
        states = torch.empty_like(like)
        with self._pulse.exchanging():
            self._group.recv([states], self._rank + self._shape.ranks_per_stage, 0).wait()
        return states

    def send(self, states: Tensor) -> None:
        """Send hidden states to the next stage. Waits only for those of the step before."""
        self.wait()
        own = states.contiguous()
        self._sent = (self._group.send([own], self._rank - self._shape.ranks_per_stage, 0), own)

    def wait(self) -> None:
        """Wait until the next stage has what was sent."""
        if self._sent is not None:
            work, _ = self._sent
            with self._pulse.exchanging():
                work.wait()
            self._sent = None

    def tell_all(self, message: bytes) -> Sequence[bytes]:
        """The messages of all ranks of all stages. Every rank calls it at the same point."""
        sizes = self._gather(torch.tensor([len(message)]))
        longest = int(max(size.item() for size in sizes))
        padded = message.ljust(longest, b"\0")
        gathered = self._gather(torch.tensor(list(padded), dtype=torch.uint8))
        return [
            bytes(each.tolist())[: int(size.item())]
            for each, size in zip(gathered, sizes, strict=True)
        ]

    def of_stages(self, of_ranks: Sequence[T]) -> list[T]:
        """By stage, what the first of its ranks has; `of_ranks`: by rank of the group."""
        return list(reversed(of_ranks[:: self._shape.ranks_per_stage]))

    def _gather(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self._shape.size)]
        with self._pulse.exchanging():
            self._group.allgather([parts], [own]).wait()
        return parts
