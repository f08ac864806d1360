"""Encodes the messages between the engine process and its client, and between machines.

A message is two frames: the name of its type and its fields as msgpack. The receiver checks both
against the types in `messages`, so it accepts nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec

from ..errors import EngineError, MalformedMessage
from ..messages import FromAgent, FromEngine, Hello, ToAgent, ToEngine

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine | ToAgent | FromAgent | Hello) -> tuple[bytes, bytes]:
    """The two frames of a message."""
    return type(message).__name__.encode(), _encoder.encode(message)


class _MessageDecoder(Generic[MessageT]):
    def __init__(self, types: Iterable[type[Any]]) -> None:
        self._decoders = {t.__name__.encode(): msgspec.msgpack.Decoder(t) for t in types}

    def __call__(self, frames: Sequence[bytes]) -> MessageT:
        """The message of these frames. Raises MalformedMessage."""
        if len(frames) != 2:
            raise MalformedMessage(f"a message has 2 frames, not {len(frames)}")
        name, payload = frames
        decoder = self._decoders.get(name)
        if decoder is None:
            raise MalformedMessage(f"unknown message type {name[:64]!r}")
        try:
            message: MessageT = decoder.decode(payload)
        except (msgspec.DecodeError, EngineError) as exc:
            raise MalformedMessage(f"{name.decode()}: {exc}") from exc
        return message


decode_to_engine: _MessageDecoder[ToEngine] = _MessageDecoder(get_args(ToEngine))
decode_from_engine: _MessageDecoder[FromEngine] = _MessageDecoder(get_args(FromEngine))
decode_to_agent: _MessageDecoder[ToAgent] = _MessageDecoder(get_args(ToAgent))
decode_from_agent: _MessageDecoder[FromAgent] = _MessageDecoder(get_args(FromAgent))
decode_hello: _MessageDecoder[Hello] = _MessageDecoder([Hello])
