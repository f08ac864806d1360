"""The connection between rank 0 and one follower: typed messages as msgpack.

It is a TCP connection whose ends have proved that they know the group's secret. Only bytes cross
it, nothing is unpickled.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock
from typing import Generic, TypeVar

import msgspec

from .commands import Answer, Command

SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")


class RankPipe(Generic[SentT, ReceivedT]):
    """One end. Several threads may send, one receives."""

    def __init__(
        self,
        connection: Connection[bytes, bytes],
        received: msgspec.msgpack.Decoder[ReceivedT],
    ) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = received
        self._sending = Lock()

    def send(self, message: SentT) -> None:
        """Send one message; waits while the other end does not read. Raises OSError if the other
        end is gone."""
        with self._sending:
            self._connection.send_bytes(self._encoder.encode(message))

    def receive(self) -> ReceivedT:
        """The next message. Raises EOFError or OSError once the other end is gone."""
        return self._decoder.decode(self._connection.recv_bytes())

    def has_message(self, timeout_seconds: float | None) -> bool:
        """Whether a message, or the end of the connection, arrives within this time; None: ever."""
        return self._connection.poll(timeout_seconds)

    def close(self) -> None:
        """End the connection: the other end's `receive` raises."""
        # The descriptor stays open: a thread that receives would read from whatever got its number.
        duplicate = socket.socket(fileno=os.dup(self._connection.fileno()))
        with duplicate, suppress(OSError):  # the other end may be gone
            duplicate.shutdown(socket.SHUT_RDWR)


LeaderPipe = RankPipe[Command, Answer]
FollowerPipe = RankPipe[Answer, Command]


def leader_pipe(connection: Connection[bytes, bytes]) -> LeaderPipe:
    """Rank 0's end of a connection."""
    return RankPipe(connection, msgspec.msgpack.Decoder(Answer))


def follower_pipe(connection: Connection[bytes, bytes]) -> FollowerPipe:
    """The follower's end of a connection."""
    return RankPipe(connection, msgspec.msgpack.Decoder(Command))
