"""Links without sockets: messages arrive in their order, each a moment later."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

from loraplex.engine.fleet.link import Receiver

SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


class End(Generic[SentT, ReceivedT]):
    """One end of a link, with the methods of `link.Link` that its owners call."""

    def __init__(self, draw_delay: Callable[[], float]) -> None:
        self.peer: End[ReceivedT, SentT]
        self.receiver: Receiver[ReceivedT]
        self._draw_delay = draw_delay
        self._sent_at = self._arrives_at = 0.0
        self._under_way: deque[SentT] = deque()

    def send(self, message: SentT) -> bool:
        loop = asyncio.get_running_loop()
        if loop.time() > self._sent_at:
            self._sent_at = loop.time()
            self._arrives_at = max(self._arrives_at, self._sent_at + self._draw_delay())
        self._under_way.append(message)
        loop.call_at(self._arrives_at, self._deliver)  # timers of one time run in any order
        return True

    def _deliver(self) -> None:
        self.peer.receiver.take(self._under_way.popleft())

    def close(self) -> None:
        """The simulation ends."""


class Network:
    """Most messages take a millisecond; some server is late by up to a tenth of a second."""

    MEAN_SECONDS = 1e-3
    LATE_SHARE = 0.02
    LATE_SECONDS = 0.1

    def __init__(self, random: Random) -> None:
        self._random = random

    def delay(self) -> float:
        if self._random.random() < self.LATE_SHARE:
            return self._random.random() * self.LATE_SECONDS
        return self._random.expovariate(1 / self.MEAN_SECONDS)
