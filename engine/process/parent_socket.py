"""The engine process's end of the socket to its parent."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Self

from .frames import FrameReader, Frames, pack

LINGER_SECONDS = 1.0
MAX_UNSENT_MESSAGES = 1000
"""The send buffer's limit: if the parent does not read, the engine waits instead of filling
memory."""
_RECEIVE_BYTES = 1 << 16


class ParentGone(Exception):
    """The parent has closed its end: it has died, or no longer needs this process."""


class ParentSocket:
    """Owns one end of a connected stream. At its end, unsent messages have a second to be sent."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._poller = select.poll()
        self._poller.register(connected, 0)
        self._received = FrameReader()
        self._unsent: deque[memoryview] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        give_up_at = time.monotonic() + LINGER_SECONDS
        while self._unsent and (left := give_up_at - time.monotonic()) > 0:
            self._await_room(timeout_ms=1000 * left)
        self._socket.close()

    def receive(self, timeout_ms: float) -> Iterator[Frames]:
        """The messages that have arrived; waits up to `timeout_ms` if there are none. Raises
        ParentGone."""
        while self._await_message(timeout_ms):
            timeout_ms = 0
            self._read()
            while (frames := self._received.next()) is not None:
                yield frames

    def send(self, frames: Frames) -> None:
        """Send, or buffer what the parent does not read yet. `receive` detects that the parent is
        gone."""
        self._unsent.append(memoryview(pack(frames)))
        self._send_more()
        while len(self._unsent) > MAX_UNSENT_MESSAGES:
            self._await_room(timeout_ms=None)

    def _await_message(self, timeout_ms: float) -> bool:
        """Wait until there is something to read, and send pending messages; True if there is."""
        self._poller.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = sum(event for _, event in self._poller.poll(timeout_ms))
        if events & select.POLLOUT:
            self._send_more()
        return bool(events & ~select.POLLOUT)

    def _await_room(self, timeout_ms: float | None) -> None:
        self._poller.modify(self._socket, select.POLLOUT)
        self._poller.poll(timeout_ms)
        self._send_more()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            raise ParentGone from exc
        if not data:
            raise ParentGone
        self._received.add(data)

    def _send_more(self) -> None:
        try:
            while self._unsent:
                rest = self._unsent[0][self._socket.send(self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # `receive` tells
            self._unsent.clear()
