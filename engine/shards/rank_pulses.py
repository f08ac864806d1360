"""Signs of life of the ranks. Torch-free.

A rank counts its own in its memory and reports them to rank 0, which keeps those of all ranks. So
they can be read while a rank hangs and after it has died.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Pulse(NamedTuple):
    """What one rank has counted."""

    num_beats: int
    """Commands, and looks for one."""
    num_marks: int
    """The beginnings and ends of its exchanges with the other ranks, and two for each layer."""
    num_lives: int
    """Signs of its process, whatever its main thread does."""

    @property
    def num_steps(self) -> int:
        """What its main thread has done."""
        return self.num_beats + self.num_marks

    @property
    def is_exchanging(self) -> bool:
        """Whether the rank is in an exchange: it may wait for another rank."""
        return self.num_marks % 2 == 1


class RankPulses:
    """The pulses of a group. Threads that are ranks may share one."""

    def __init__(self, size: int) -> None:
        self._numbers = [[0] * len(Pulse._fields) for _ in range(size)]

    def of(self, rank: int) -> RankPulse:
        """The pulse of one rank, for this rank."""
        return RankPulse(self._numbers[rank])

    def read(self) -> list[Pulse]:
        """The pulses of all ranks, in their order."""
        return [Pulse(*numbers) for numbers in self._numbers]

    def note(self, rank: int, pulse: Pulse) -> None:
        """Take what a rank has reported."""
        self._numbers[rank][:] = pulse


class RankPulse:
    """The pulse of one rank, which this rank counts."""

    def __init__(self, numbers: list[int]) -> None:
        """`numbers`: the fields of `Pulse`."""
        self._numbers = numbers

    def beat(self) -> None:
        """Count a command, or a look for one."""
        self._numbers[0] += 1

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around an exchange. One that fails does not end."""
        self._numbers[1] += 1
        yield
        self._numbers[1] += 1

    def pass_layer(self) -> None:
        """Count a layer, so that a long step between two exchanges shows its progress."""
        with self.exchanging():
            pass

    def live(self) -> None:
        """Count a sign of the process, in a thread of its own."""
        self._numbers[2] += 1

    def read(self) -> Pulse:
        """What was counted."""
        return Pulse(*self._numbers)
