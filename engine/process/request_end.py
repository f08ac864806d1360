"""The end of a request, which is known after its stream was closed too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from ..messages import NO_RESOURCES, RequestFinished, Resources


class RequestEnd:
    """Whether the engine has ended a request, and what the request had used."""

    def __init__(self) -> None:
        self.used = NO_RESOURCES
        self._has_come = asyncio.Event()

    @property
    def has_come(self) -> bool:
        return self._has_come.is_set()

    def come(self, event: RequestFinished) -> None:
        """Take the request's last event."""
        self.used = event.used
        self._has_come.set()

    async def wait(self) -> None:
        """Return once the request has ended."""
        await self._has_come.wait()


async def used_by(ends: Sequence[RequestEnd], *, patience_seconds: float) -> Resources:
    """What requests have used together. Waits for those that were closed and are still to end, but
    no longer than this: what comes later is not counted."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_seconds):
            for end in ends:
                await end.wait()
    return sum((end.used for end in ends), start=NO_RESOURCES)
