"""The events of an agent's requests on their way to one API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..messages import (
    PromptOutput,
    RequestFinished,
    RequestStarted,
    StepEvents,
    TokensGenerated,
)
from ..process.request_stream import RequestEvent


class RelayedEvents:
    """Gathers what arrives in one iteration of the event loop and sends it as one message.

    Within it, the events of a request keep their order, as `StepEvents` states it.
    """

    def __init__(self, send: Callable[[StepEvents], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._gathered = StepEvents()
        self._is_scheduled = False

    def add(self, event: RequestEvent) -> None:
        """Send the event at the end of this iteration."""
        match event:
            case TokensGenerated():
                self._gathered.tokens.append(event)
            case RequestFinished():
                self._gathered.finished.append(event)
            case RequestStarted():
                self._gathered.started.append(event)
            case PromptOutput():
                self._gathered.prompts.append(event)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what was gathered."""
        self._is_scheduled = False
        gathered, self._gathered = self._gathered, StepEvents()
        self._send(gathered)
