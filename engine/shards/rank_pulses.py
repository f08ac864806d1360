"""Signs of life of the ranks, in memory that all processes of a group share. Torch-free.

Writing makes no system call. The numbers can be read while a rank hangs and after it has died.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import NamedTuple

_NUMBER_BYTES = 8
LIFE_SECONDS = 0.4
"""How often a process that runs shows it."""


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


_PULSE_BYTES = len(Pulse._fields) * _NUMBER_BYTES


class RankPulses:
    """The pulses of a group. Each rank writes its own."""

    def __init__(self, size: int, descriptor: int = -1) -> None:
        """`descriptor`: of an open file that the group shares; -1: the ranks are threads."""
        self._map = mmap.mmap(descriptor, self.num_bytes(size))
        self._size = size

    @staticmethod
    def num_bytes(size: int) -> int:
        """The size of the shared file for so many ranks."""
        return size * _PULSE_BYTES

    def of(self, rank: int) -> RankPulse:
        """The pulse of one rank, for this rank."""
        return RankPulse(self, rank)

    def read(self) -> list[Pulse]:
        """The pulses of all ranks, in their order."""
        return [
            Pulse(*(self._number(rank, index) for index in range(len(Pulse._fields))))
            for rank in range(self._size)
        ]

    def count(self, rank: int, index: int) -> None:
        """Count one more of the field `index` of a rank's pulse."""
        number = self._number(rank, index) + 1
        self._map[_place(rank, index)] = number.to_bytes(_NUMBER_BYTES, "little")

    def _number(self, rank: int, index: int) -> int:
        return int.from_bytes(self._map[_place(rank, index)], "little")


class RankPulse:
    """The pulse of one rank, which this rank counts."""

    def __init__(self, pulses: RankPulses, rank: int) -> None:
        self._pulses = pulses
        self._rank = rank

    def beat(self) -> None:
        """Count a command, or a look for one."""
        self._pulses.count(self._rank, 0)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around an exchange. One that fails does not end."""
        self._pulses.count(self._rank, 1)
        yield
        self._pulses.count(self._rank, 1)

    def pass_layer(self) -> None:
        """Count a layer, so that a long step between two exchanges shows its progress."""
        with self.exchanging():
            pass

    @contextmanager
    def living(self) -> Iterator[None]:
        """Inside, a thread shows that the process runs."""
        is_over = Event()

        def live() -> None:
            while not is_over.wait(LIFE_SECONDS):
                self._pulses.count(self._rank, 2)

        Thread(target=live, name="rank-life", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def _place(rank: int, index: int) -> slice:
    """Where a number of a pulse is; `index`: of the field."""
    start = rank * _PULSE_BYTES + index * _NUMBER_BYTES
    return slice(start, start + _NUMBER_BYTES)
