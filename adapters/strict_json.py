"""Parses untrusted JSON strictly.

Python's parser lets the last of two equal keys win and accepts NaN, Infinity and 1e999. Here each
is an error, so that two parsers of the same bytes cannot disagree.
"""

from __future__ import annotations

import json
import math
from typing import NoReturn

SHOWN_CHARACTERS = 200


class MalformedJson(ValueError):
    """Not strict JSON."""


class DuplicateKey(MalformedJson):
    """An object names a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {shown(key)} appears twice")
        self.key = key


def parse_json_object(data: bytes) -> dict[str, object]:
    """Parse one UTF-8 JSON object. The caller bounds the size.

    Raises DuplicateKey or MalformedJson.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except MalformedJson:
        raise
    except (ValueError, RecursionError) as exc:
        raise MalformedJson("it cannot be parsed as JSON") from exc
    if not isinstance(value, dict):
        raise MalformedJson("it is not a JSON object")
    return value


def shown(text: str) -> str:
    """Untrusted text for messages and logs: quoted, ASCII, short."""
    return f"'{escaped(text)}'"


def escaped(text: str) -> str:
    """`shown` without the quotes."""
    printable = ascii(text[:SHOWN_CHARACTERS])[1:-1]
    is_short = len(text) <= SHOWN_CHARACTERS and len(printable) <= SHOWN_CHARACTERS
    return printable if is_short else printable[: SHOWN_CHARACTERS - 3] + "..."


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise DuplicateKey(key)
        result[key] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedJson(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedJson("a number is out of range")
    return value
