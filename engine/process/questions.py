"""Questions to the engine that wait for answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ..errors import EngineUnavailable
from ..messages import DeleteAdapter, ExplainAdapter, ListRequests, MapMemory

Question = DeleteAdapter | ExplainAdapter | ListRequests | MapMemory

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class Questions(Generic[Key, Answer]):
    """Questions of one kind, by key. Callers with the same question share the answer."""

    def __init__(self, send: Callable[[Question], object]) -> None:
        self._send = send
        self._answers: dict[Key, asyncio.Future[Answer]] = {}

    @property
    def open_keys(self) -> Sequence[Key]:
        """The open questions."""
        return list(self._answers)

    async def ask(self, key: Key, question: Question) -> Answer:
        """Ask the engine. Raises EngineUnavailable if it does not answer."""
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = asyncio.get_running_loop().create_future()
            self._send(question)
        await asyncio.wait([answer])
        if answer.cancelled():
            raise EngineUnavailable
        return answer.result()

    def answer(self, key: Key, answer: Answer) -> None:
        """Deliver an answer; no effect if no caller waits for it."""
        waiting = self._answers.pop(key, None)
        if waiting is not None:
            waiting.set_result(answer)

    def give_up(self) -> None:
        """Fail all open questions."""
        for waiting in self._answers.values():
            waiting.cancel()
        self._answers.clear()
