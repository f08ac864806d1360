"""The two directions between the API server and a replica: in order, late, and lost with either."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")

DELAYS = (0.0, 0.0, 0.0, 0.002, 0.02, 0.2)
"""Seconds."""


class Direction(Generic[MessageT]):
    """Messages arrive in the order in which they were sent."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._on_the_way: deque[tuple[float, MessageT]] = deque()

    def __len__(self) -> int:
        return len(self._on_the_way)

    def send(self, message: MessageT, now: float) -> None:
        self._on_the_way.append((now + self._rng.choice(DELAYS), message))

    def receive(self, now: float) -> MessageT | None:
        """The next message, if it has arrived."""
        if not self._on_the_way or self._on_the_way[0][0] > now:
            return None
        return self._on_the_way.popleft()[1]

    def lose(self) -> None:
        """Everything that is on the way."""
        self._on_the_way.clear()
