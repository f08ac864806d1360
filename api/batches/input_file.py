"""The input of a batch: a JSON object per line, in a file on this machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...platform.base import JsonObject

MAX_LINES = 50_000
MAX_LINE_BYTES = 4 << 20
"""The body of a request has this limit too."""
MAX_CUSTOM_ID_LENGTH = 512
MAX_ERRORS = 100
"""Reported of one file; the rest is not looked for."""


class Line(NamedTuple):
    """One request of the file."""

    custom_id: str
    body: bytes


class InvalidLine(Exception):
    """A line cannot be answered."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class _Body(msgspec.Struct):
    """What is read of a request before it is sent to its route."""

    stream: bool | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Names(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


class InputFile:
    """The lines of a file that was checked, by number."""

    def __init__(self, file: int, spans: list[tuple[int, int]]) -> None:
        self._file = file
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, number: int) -> Line:
        start, size = self._spans[number]
        names = msgspec.json.decode(os.pread(self._file, size, start), type=_Names)
        return Line(names.custom_id, bytes(names.body))

    def close(self) -> None:
        os.close(self._file)


def open_input(path: Path, endpoint: str) -> InputFile | list[JsonObject]:
    """The file's lines, or what is wrong with them, in the form of OpenAI's `errors.data`.

    Empty lines are skipped. It reads the whole file. Raises OSError.
    """
    errors: list[JsonObject] = []
    spans: list[tuple[int, int]] = []
    seen: set[bytes] = set()
    for number, start, line in _lines(path):
        if len(spans) == MAX_LINES:
            errors.append(_error("invalid_parameter", f"more than {MAX_LINES} lines", number))
            break
        try:
            custom_id = _check(line, endpoint)
            digest = hashlib.sha256(custom_id.encode()).digest()
            if digest in seen:
                raise InvalidLine(
                    "duplicate_custom_id", f"custom_id: {custom_id!r} is not unique", "custom_id"
                )
        except InvalidLine as exc:
            errors.append(_error(exc.code, str(exc), number, exc.param))
            if len(errors) == MAX_ERRORS:
                break
            continue
        seen.add(digest)
        spans.append((start, len(line)))
    if not spans and not errors:
        errors.append(_error("invalid_parameter", "the file has no lines", None))
    return errors or InputFile(os.open(path, os.O_RDONLY), spans)


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """The number of each line in the file, from 1, its place and its bytes."""
    start = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if line.strip():
                yield number, start, line
            start += len(line)
            if len(line) > MAX_LINE_BYTES:
                return


def _check(line: bytes, endpoint: str) -> str:
    """The line's custom_id. Raises InvalidLine."""
    if len(line) > MAX_LINE_BYTES:
        raise InvalidLine("body_too_large", f"the line exceeds {MAX_LINE_BYTES} bytes")
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except msgspec.ValidationError as exc:
        raise InvalidLine("invalid_parameter", str(exc)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise InvalidLine("invalid_json", f"the line is not a JSON object: {exc}") from None
    if not 1 <= len(parsed.custom_id) <= MAX_CUSTOM_ID_LENGTH:
        message = f"custom_id: must have 1 to {MAX_CUSTOM_ID_LENGTH} characters"
        raise InvalidLine("invalid_parameter", message, "custom_id")
    if parsed.method != "POST":
        raise InvalidLine("invalid_parameter", "method: must be POST", "method")
    if parsed.url != endpoint:
        raise InvalidLine(
            "invalid_parameter", f"url: must be {endpoint}, as the batch's endpoint", "url"
        )
    _check_body(parsed.body)
    return parsed.custom_id


def _check_body(body: msgspec.Raw) -> None:
    try:
        is_streamed = msgspec.json.decode(body, type=_Body).stream
    except msgspec.ValidationError as exc:
        raise InvalidLine("invalid_parameter", f"body: {exc}", "body") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise InvalidLine("invalid_json", f"body: {exc}", "body") from None
    if is_streamed:
        message = "body.stream: a batch has no streams"
        raise InvalidLine("unsupported_parameter", message, "body.stream")


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
