"""A JSON body as it arrives: in pieces, endless, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from loraplex.api.contract.errors import ApiError
from loraplex.api.http import bodies
from loraplex.api.http.bodies import read_body

LIMIT = 8


def read(*chunks: bytes, is_whole: bool = True, pause_seconds: float = 0.0) -> bytes:
    """What is read of a sender of these chunks, who pauses before each but the first."""
    return asyncio.run(_read(chunks, is_whole=is_whole, pause_seconds=pause_seconds))


async def _read(chunks: Sequence[bytes], *, is_whole: bool, pause_seconds: float) -> bytes:
    sent = 0

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.sleep(pause_seconds)
        if sent == len(chunks):
            return {"type": "http.disconnect"}
        sent += 1
        more = not is_whole or sent < len(chunks)
        return {"type": "http.request", "body": chunks[sent - 1], "more_body": more}

    return await read_body(Request({"type": "http", "headers": []}, receive), LIMIT)


@pytest.mark.parametrize("chunks", [(b"",), (b"12345678",), (b"12", b"", b"345678"), (b"1", b"")])
def test_a_body_is_read_whole_however_it_is_cut(chunks: tuple[bytes, ...]) -> None:
    assert read(*chunks) == b"".join(chunks)


def test_a_body_is_refused_with_the_piece_that_exceeds_the_limit() -> None:
    with pytest.raises(ApiError) as caught:
        read(b"12345678", b"9", is_whole=False)
    assert caught.value.code == "body_too_large"


def test_a_sender_that_leaves_before_the_end_is_no_error_of_the_body() -> None:
    with pytest.raises(ClientDisconnect):
        read(b"12", is_whole=False)


@pytest.mark.parametrize(
    ("bound", "pause_seconds"), [("SILENCE_SECONDS", 60.0), ("WHOLE_BODY_SECONDS", 0.03)]
)
def test_a_sender_that_is_silent_or_slow_is_given_up(
    bound: str, pause_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, bound, 0.1)
    with pytest.raises(ApiError) as caught:
        read(b"1", *[b""] * 1000, is_whole=False, pause_seconds=pause_seconds)
    assert caught.value.code == "request_timeout"


def test_each_piece_gives_the_sender_new_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SILENCE_SECONDS", 1.5)
    assert read(*[b"1"] * LIMIT, pause_seconds=0.25) == b"1" * LIMIT
