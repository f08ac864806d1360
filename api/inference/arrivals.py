"""The deltas that have arrived for one caller and have not been consumed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...engine.messages import RequestStarted
from .sequence_text import Delta

MAX_PIECES = 64
"""Waiting texts of one choice, merged when they are consumed."""


class Arrivals:
    """Deltas that wait for their consumer, which is woken once for all that arrive together.

    A fast consumer gets every delta as it arrives. For a slow consumer, waiting text is merged into
    one delta per choice, so a slow client costs little more than its unread text.
    """

    def __init__(self) -> None:
        self._started: RequestStarted | None = None
        self._failure: Exception | None = None
        self._waiting: dict[int, list[Delta]] = {}
        """By choice."""
        self._taker: asyncio.Future[None] | None = None
        """The future of the waiting consumer."""
        self._offer: Callable[[Delta], bool] | None = None
        """Only while the taker waits in `next` and nothing has woken it."""
        self._ended = asyncio.Event()

    def start(self, started: RequestStarted) -> None:
        """A sequence has begun; the first one counts."""
        if self._started is None:
            self._started = started
            self._wake()

    def add(self, delta: Delta) -> None:
        """Add the next delta of its choice. Raises an error of the consumer to which it is
        offered."""
        if self._failure is not None:
            return
        if self._offer is not None and delta.finish_reason is None and self._offer(delta):
            return
        pieces = self._waiting.setdefault(delta.index, [])
        pieces.append(delta)
        if len(pieces) == MAX_PIECES:
            self._waiting[delta.index] = merged(pieces)
        self._wake()

    def fail(self, failure: Exception) -> None:
        """Deltas so far can still be consumed, then this is raised; later ones are ignored."""
        if self._failure is None:
            self._failure = failure
            self.end()
            self._wake()

    def end(self) -> None:
        """All deltas have arrived."""
        self._ended.set()

    async def first(self) -> RequestStarted:
        """The first start. Raises the failure if there was one."""
        while self._started is None:
            if self._failure is not None:
                raise self._failure
            await self._wait()
        return self._started

    async def next(self, offer: Callable[[Delta], bool] | None = None) -> list[Delta]:
        """The deltas that have arrived, at least one. Raises the failure.

        While this waits, `offer` is called with each delta that does not end its choice. If it
        returns True, the delta is consumed and the task is not woken.
        """
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._offer = offer
            try:
                await self._wait()
            finally:
                self._offer = None
        waiting, self._waiting = self._waiting, {}
        taken: list[Delta] = []
        for pieces in waiting.values():
            taken += merged(pieces)
        return taken

    async def all(self) -> dict[int, list[Delta]]:
        """All deltas by choice, once they have arrived. Raises the failure."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return {index: merged(pieces) for index, pieces in self._waiting.items()}

    def _wake(self) -> None:
        self._offer = None  # later deltas queue after the one that woke the task
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def _wait(self) -> None:
        self._taker = asyncio.get_running_loop().create_future()
        await self._taker


def merged(deltas: list[Delta]) -> list[Delta]:
    """Merge consecutive deltas of one choice if they contain only text.

    Log-probabilities stay with the text of their delta, which determines the part of an answer they
    belong to.
    """
    if len(deltas) == 1 or not all(delta.is_text for delta in deltas):
        return deltas
    text = "".join([delta.text for delta in deltas])
    last = deltas[-1]
    return [Delta(last.index, text, [], last.finish_reason, stop=last.stop)]
