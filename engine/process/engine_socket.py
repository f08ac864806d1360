"""The parent's end of the socket to an engine process, for an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ..errors import MalformedMessage
from .frames import FrameReader, Frames, pack

_RECEIVE_BYTES = 1 << 16


class EngineSocket:
    """Owns one end of a connected stream.

    One message is delivered per iteration of the event loop, so a busy engine does not monopolize
    the loop. While messages are pending, nothing is read. It is not an asyncio transport: a
    transport that can no longer send also stops reading, which would lose the last messages of a
    dead process.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Must be called in the running loop."""
        connected.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._received = FrameReader()
        self._next: asyncio.Handle | None = None
        """Scheduled while received messages are pending."""
        self._unsent = bytearray()
        self._is_sending = False
        """Whether the loop watches for writability."""
        self._ignores_input = False
        """Whether the peer has stopped reading."""

    def listen(
        self,
        on_message: Callable[[Frames], None],
        on_end: Callable[[MalformedMessage | None], None],
    ) -> None:
        """Start delivering messages. The loop reports an error of `on_message`.

        `on_end` is called once, after the last message, when the peer has ended the connection, or
        with an error when the peer's bytes are no messages. It is not called after `close`.
        """
        self._on_message = on_message
        self._on_end = on_end
        self._loop.add_reader(self._socket.fileno(), self._receive)

    def send(self, frames: Frames) -> bool:
        """Send without waiting; False if the connection cannot send any more."""
        if self._ignores_input:
            return False
        self._unsent += pack(frames)
        self._send_more()
        return not self._ignores_input

    def close(self) -> None:
        """Stop sending and receiving. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._fall_silent()
        self._loop.remove_reader(self._socket.fileno())
        if self._next is not None:
            self._next.cancel()
        self._socket.close()

    def _receive(self) -> None:
        if self._next is not None:
            return
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._received.add(data)
            self._take_one()
        else:
            self._stop_listening(None)

    def _take_one(self) -> None:
        self._next = None
        try:
            frames = self._received.next()
        except MalformedMessage as exc:
            self._stop_listening(exc)
            return
        if frames is None:
            return
        if self._received:
            self._next = self._loop.call_soon(self._take_one)
        self._on_message(frames)

    def _stop_listening(self, error: MalformedMessage | None) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._on_end(error)

    def _send_more(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._fall_silent()
            return
        if self._unsent and not self._is_sending:
            self._is_sending = True
            self._loop.add_writer(self._socket.fileno(), self._send_more)
        elif self._is_sending and not self._unsent:
            self._is_sending = False
            self._loop.remove_writer(self._socket.fileno())

    def _fall_silent(self) -> None:
        self._ignores_input = True
        self._unsent.clear()
        if self._is_sending:
            self._is_sending = False
            self._loop.remove_writer(self._socket.fileno())
