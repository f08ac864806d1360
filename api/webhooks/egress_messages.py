"""Messages between the server and the egress process: see `json_frames`.

Both sides check messages against these types when they read them.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ...adapters.json_frames import decode
from ...platform.webhooks.event_types import Failure


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Open(Message, frozen=True):
    """The first message to the process: what the operator allows."""

    hosts: list[str]
    """As `parse_allowed_host` reads them."""
    networks: list[str]
    """In CIDR notation."""


class Deliver(Message, frozen=True):
    """Send this body by POST. Answered by Delivered."""

    call_id: int
    url: str
    headers: dict[str, str]
    body: bytes


class Ready(Message, frozen=True):
    """The process is confined and takes deliveries."""


class Delivered(Message, frozen=True):
    """The result of a delivery."""

    call_id: int
    status: int | None
    """Of the answer; None: there was none."""
    failure: Failure | None
    """None: delivered."""
    retry_after: int | None
    """Seconds until the receiver wants the next attempt, if it says so."""


ToEgress: TypeAlias = Open | Deliver
FromEgress: TypeAlias = Ready | Delivered

_TO_EGRESS: msgspec.json.Decoder[ToEgress] = msgspec.json.Decoder(ToEgress)
_FROM_EGRESS: msgspec.json.Decoder[FromEgress] = msgspec.json.Decoder(FromEgress)


def decode_to_egress(content: bytes) -> ToEgress:
    """Raises MessageRefused."""
    return decode(_TO_EGRESS, content)


def decode_from_egress(content: bytes) -> FromEgress:
    """Raises MessageRefused."""
    return decode(_FROM_EGRESS, content)
