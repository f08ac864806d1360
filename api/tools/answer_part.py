"""The parts of an output: reasoning, text and function calls."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


def new_call_id() -> str:
    """Names a call: nine letters and digits, the only form that Mistral's templates take back."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """The model calls a function; its arguments follow."""

    index: int
    """Counts the calls of one answer."""
    name: str
    id: str = field(default_factory=new_call_id)


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """The next piece of the JSON object of a call's arguments, as the model writes it."""

    index: int
    text: str


AnswerPart = ReasoningText | Text | CallOpened | ArgumentsText
