"""The trainer's end of the socket to the server."""

from __future__ import annotations

import os
import select
import socket

from ...adapters.json_frames import Inbox
from .messages import FromTrainer, ToTrainer, decode_to_trainer, encode

_RECEIVE_BYTES = 1 << 16


class Connection:
    """Sends reports and receives orders. If the server is gone, this process ends."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._inbox = Inbox()
        self._arrived: list[ToTrainer] = []

    def send(self, message: FromTrainer) -> None:
        """Send a complete message."""
        try:
            self._socket.sendall(encode(message))
        except OSError:
            os._exit(0)

    def receive(self) -> ToTrainer:
        """The next order. Raises MessageRefused."""
        while not self._arrived:
            self._read()
        return self._arrived.pop(0)

    def poll(self) -> ToTrainer | None:
        """The next order if one has arrived. Raises MessageRefused."""
        while not self._arrived and select.select([self._socket], [], [], 0)[0]:
            self._read()
        return self._arrived.pop(0) if self._arrived else None

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        self._arrived.extend(map(decode_to_trainer, self._inbox.take(data)))
