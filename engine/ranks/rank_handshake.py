"""Both ends of a connection between ranks prove that they know the group's secret. Torch-free.

Rank 0 sends a nonce. The follower answers with its rank, the connection's purpose, a nonce and a
proof: an HMAC-SHA256 over all of these. Rank 0 answers with its verdict and a proof of its own. All
sizes are fixed, and nothing else is read from an end that has not proved itself.

The bytes behind the handshake are neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from ..errors import RankRefused

HANDSHAKE_SECONDS = 5.0
"""An end that says nothing for so long is disconnected."""
_PROTOCOL = b"lprank01"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct(f"!{len(_PROTOCOL)}sIB")
_JOINED, _NOT_WANTED = b"\0", b"\1"


class Purpose(IntEnum):
    """What crosses a connection."""

    COMMANDS = 0
    FILES = 1
    """The adapters' files, for a follower on another host."""


class RankLink(NamedTuple):
    """One connection of a follower."""

    rank: int
    purpose: Purpose


def join(connected: socket.socket, link: RankLink, secret: bytes) -> None:
    """Prove at a follower's end that it may be this rank.

    Raises RankRefused if rank 0 has another secret or does not want this rank, OSError.
    """
    connected.settimeout(HANDSHAKE_SECONDS)
    challenge = _receive(connected, _NONCE_BYTES)
    head, nonce = _HEAD.pack(_PROTOCOL, link.rank, link.purpose), secrets.token_bytes(_NONCE_BYTES)
    said = head + challenge + nonce
    connected.sendall(head + nonce + _proof(secret, b"follower" + said))
    try:
        verdict = _receive(connected, len(_JOINED))
        proof = _receive(connected, _PROOF_BYTES)
    except EOFError:
        raise RankRefused(f"Rank 0 refuses rank {link.rank}: its secret is another one.") from None
    if not hmac.compare_digest(proof, _proof(secret, b"leader" + said + verdict)):
        raise RankRefused("What listens at the address of rank 0 does not know the secret.")
    if verdict != _JOINED:
        raise RankRefused(
            f"Rank 0 refuses rank {link.rank}: it has joined already, or rank 0's host starts it."
        )
    connected.settimeout(None)


def admit(
    connected: socket.socket, secret: bytes, is_wanted: Callable[[RankLink], bool]
) -> RankLink:
    """Prove at rank 0's end that this is rank 0; returns what has joined.

    Raises RankRefused if the other end does not know the secret or is not wanted, OSError,
    EOFError.
    """
    connected.settimeout(HANDSHAKE_SECONDS)
    challenge = secrets.token_bytes(_NONCE_BYTES)
    connected.sendall(challenge)
    head = _receive(connected, _HEAD.size)
    nonce = _receive(connected, _NONCE_BYTES)
    proof = _receive(connected, _PROOF_BYTES)
    said = head + challenge + nonce
    if not hmac.compare_digest(proof, _proof(secret, b"follower" + said)):
        raise RankRefused("its secret is another one")
    protocol, rank, purpose = _HEAD.unpack(head)
    if protocol != _PROTOCOL:
        raise RankRefused("its protocol is another one")
    link = RankLink(rank, Purpose(purpose))
    verdict = _JOINED if is_wanted(link) else _NOT_WANTED
    connected.sendall(verdict + _proof(secret, b"leader" + said + verdict))
    if verdict != _JOINED:
        raise RankRefused(f"rank {rank} has joined already, or is none of another host")
    connected.settimeout(None)
    return link


def _proof(secret: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, said, "sha256")


def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes. Raises EOFError, OSError."""
    received = b""
    while len(received) < num_bytes:
        more = connected.recv(num_bytes - len(received))
        if not more:
            raise EOFError("the connection has ended")
        received += more
    return received
