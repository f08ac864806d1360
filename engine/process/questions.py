"""Questions to the engine, and those who wait for the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ..errors import EngineUnavailable
from ..messages import ToEngine

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class Questions(Generic[Key, Answer]):
    """Questions of one kind by key. Whoever asks what is being asked already shares the answer."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._answers: dict[Key, asyncio.Future[Answer]] = {}

    @property
    def open_keys(self) -> Sequence[Key]:
        """What is not answered yet."""
        return list(self._answers)

    async def ask(self, key: Key, question: ToEngine) -> Answer:
        """The engine's answer. Raises EngineUnavailable if none will come."""
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = asyncio.get_running_loop().create_future()
            self._send(question)
        await asyncio.wait([answer])
        if answer.cancelled():
            raise EngineUnavailable
        return answer.result()

    def answer(self, key: Key, answer: Answer) -> None:
        """This is the answer; one that nobody waits for is dropped."""
        waiting = self._answers.pop(key, None)
        if waiting is not None:
            waiting.set_result(answer)

    def give_up(self) -> None:
        """No question that is open will be answered."""
        for waiting in self._answers.values():
            waiting.cancel()
        self._answers.clear()
