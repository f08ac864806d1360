"""Cancels work when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The caller closed the connection before the answer was complete."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; cancels it and raises ClientDisconnected if the client disconnects.

    The request's body must have been read, so that the next message is the disconnect.
    """
    working = asyncio.current_task()
    assert working is not None
    num_cancels = working.cancelling()
    is_gone = False

    def leave(_: asyncio.Task[None]) -> None:
        nonlocal is_gone
        is_gone = True
        working.cancel()

    watching = asyncio.create_task(_disconnected(receive))
    watching.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and working.cancelling() == num_cancels + 1:
            raise ClientDisconnected from None
        raise
    finally:
        watching.remove_done_callback(leave)
        if is_gone:
            working.uncancel()
        watching.cancel()  # it ends without being awaited


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
