"""The lines of a batch's output and error files, in the form of OpenAI's API."""

from __future__ import annotations

import hashlib

import msgspec

from .call import Answer


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _ResultLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


def answered_line(batch_id: str, number: int, custom_id: str, answer: Answer) -> bytes:
    """The line of an answer, of success or not."""
    response = _Response(answer.status, answer.request_id, msgspec.Raw(answer.body))
    return _encode(_ResultLine(_line_id(batch_id, number), custom_id, response, None))


def unanswered_line(
    batch_id: str, number: int, custom_id: str, *, code: str, message: str
) -> bytes:
    """The line of a request that was not answered, because its batch ended before."""
    return _encode(_ResultLine(_line_id(batch_id, number), custom_id, None, _Error(code, message)))


def _line_id(batch_id: str, number: int) -> str:
    digest = hashlib.sha256(f"{batch_id}:{number}".encode()).hexdigest()
    return f"batch_req_{digest[:32]}"


def _encode(line: _ResultLine) -> bytes:
    return msgspec.json.encode(line)
