"""The parent's end of the socket to an engine process, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

Frames = Sequence[bytes]


class EngineSocket:
    """Owns a bound socket. Messages are handed over one a turn of the loop, so that an engine that
    never falls silent keeps the loop from nobody.

    What asyncio's side of pyzmq does with futures costs a tenth of a millisecond a message, which
    is most of what a token costs that is alone in its step.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: asyncio.Handle | None = None
        """The next look at what has come, while one is due."""

    def listen(self, on_message: Callable[[Frames], None]) -> None:
        """From now on hand over what comes; an error of `on_message` is the loop's to report."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._look_again)
        self._look_again()

    def send(self, frames: Frames) -> bool:
        """Send without waiting; False if it cannot be sent, now or ever."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # a closed socket's too
            return False
        finally:
            # The descriptor tells once that something has come, and sending may have used that up.
            self._look_again()
        return True

    def close(self) -> None:
        """Take nothing more. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._socket.close()

    def _look_again(self) -> None:
        if self._loop is not None and self._look is None:
            self._look = self._loop.call_soon(self._take_one)

    def _take_one(self) -> None:
        self._look = None
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        self._look_again()
        self._on_message(frames)
