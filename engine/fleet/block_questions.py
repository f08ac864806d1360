"""Where the blocks are that an agent's engine wants: API servers know it, agents do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...adapters.errors import AdapterError, AdapterUnavailable
from ...adapters.fetcher_messages import Failed
from ...adapters.identity import AdapterKey
from ..messages import AdapterFetchFailed, AdapterWanted, BlockFound

Ask = Callable[[AdapterWanted], bool]
"""Sends a question to an API server; False if it cannot be reached."""


class BlockQuestions:
    """Asks one API server, and another one if that goes away. All of them read one database."""

    def __init__(self, list_servers: Callable[[], Sequence[Ask]]) -> None:
        """`list_servers`: the API servers that are connected now."""
        self._list_servers = list_servers
        self._open: dict[AdapterKey, asyncio.Future[BlockFound]] = {}

    async def locate(self, key: AdapterKey) -> BlockFound:
        """Raises the AdapterError with which an API server answers, or AdapterUnavailable if none
        is connected."""
        answer = self._open.get(key)
        if answer is None:
            answer = self._open[key] = asyncio.get_running_loop().create_future()
            self._ask(key)
        return await asyncio.shield(answer)

    def answer(self, answer: BlockFound | AdapterFetchFailed) -> None:
        """Take an API server's answer; no effect if it is not wanted any more."""
        future = self._open.pop(answer.key, None)
        if future is None:
            return
        if isinstance(answer, BlockFound):
            future.set_result(answer)
        else:
            _fail(future, _as_error(answer))

    def ask_again(self) -> None:
        """An API server has gone, with the questions that it had."""
        for key in list(self._open):
            self._ask(key)

    def _ask(self, key: AdapterKey) -> None:
        if not any(ask(AdapterWanted(key)) for ask in self._list_servers()):
            _fail(self._open.pop(key), AdapterUnavailable("no API server is connected"))


def _as_error(answer: AdapterFetchFailed) -> AdapterError:
    error = Failed(0, answer.error.code, answer.error.message).as_error()
    return error if isinstance(error, AdapterError) else AdapterUnavailable(str(error))


def _fail(future: asyncio.Future[BlockFound], error: AdapterError) -> None:
    future.set_exception(error)
    future.exception()  # retrieved here, since the asker may have gone
