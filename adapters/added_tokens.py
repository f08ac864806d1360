"""The tokens that an adapter adds to the base's vocabulary.

Their rows are auxiliary tensors of the two ends. Their texts come from the trainer's tokenizer, as
the field `added_tokens` of the configuration: a list of objects such as `tokenizer.json` has, each
with a further field `ends_output` where the token ends an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import AdapterRejected

FIELD = "added_tokens"
MAX_ADDED_TOKENS = 1024
"""The most rows by which an adapter's embedding and head may differ from the base's."""
MAX_TOKEN_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token with a text of its own; the flags are those of the library `tokenizers`."""

    id: int
    content: str
    special: bool = False
    """It is no part of the text of an answer."""
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    ends_output: bool = False
    """It ends an answer, as the tokenizer's end-of-sequence token."""


def parse_added_tokens(value: object) -> tuple[AddedToken, ...]:
    """The tokens of the configuration's field, by ascending ID.

    Raises AdapterRejected.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_ADDED_TOKENS:
        raise _malformed(f"is not a list of at most {MAX_ADDED_TOKENS} tokens")
    tokens = sorted(map(_token, value), key=lambda token: token.id)
    for name in ("id", "content"):
        if len({getattr(token, name) for token in tokens}) != len(tokens):
            raise _malformed(f"has two tokens of one {name}")
    return tuple(tokens)


def added_tokens_of(report: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """Those of a stored intake report."""
    return tuple(AddedToken(**token) for token in report.get(FIELD, ()))


def as_fields(tokens: Sequence[AddedToken]) -> list[dict[str, object]]:
    """The configuration's field: `parse_added_tokens` gives these tokens again."""
    return [asdict(token) for token in tokens]


def _token(entry: object) -> AddedToken:
    if not isinstance(entry, dict) or not set(entry) <= set(AddedToken.__slots__):
        raise _malformed(f"has an entry with other fields than {', '.join(AddedToken.__slots__)}")
    number, content = entry.get("id"), entry.get("content")
    flags = [value for name, value in entry.items() if name not in ("id", "content")]
    if type(number) is not int or number < 0 or not all(type(flag) is bool for flag in flags):
        raise _malformed("has an entry whose id is no number, or whose flag is not true or false")
    if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARACTERS:
        raise _malformed(f"has an entry whose content is no text of 1 to {MAX_TOKEN_CHARACTERS}")
    if not content.isprintable():
        raise _malformed("has an entry whose content has characters that cannot be printed")
    return AddedToken(**entry)


def _malformed(fault: str) -> AdapterRejected:
    return AdapterRejected("malformed_config", f"{FIELD} {fault}", pointer=f"/{FIELD}")
