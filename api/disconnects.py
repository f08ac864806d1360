"""Work that ends when the caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")

CLIENT_DISCONNECTED = "client_disconnected"
"""What the log and the metrics call a request whose caller went away; nobody is answered it."""


class ClientDisconnected(Exception):
    """The caller closed the connection before the answer was complete."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it and raises ClientDisconnected if the caller goes away.

    The request's body must have been read, so that the next thing to receive is the disconnect.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return await working
    finally:
        await _cancel(watching)
        await _cancel(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    if task.done():
        return
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
