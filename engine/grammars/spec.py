"""A request's grammar: its kind and text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..errors import InvalidGrammar

MAX_GRAMMAR_BYTES = 64 << 10


class GrammarKind(StrEnum):
    """The language that a grammar's text is written in."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema: the output is one JSON value that it describes."""
    JSON_OBJECT = "json_object"
    """No text: the output is any JSON object."""
    REGEX = "regex"
    """A regular expression that the whole output matches; without look-around and references
    back."""
    CHOICE = "choice"
    """A JSON array of strings: the output is one of them."""
    LARK = "lark"
    """A context-free grammar in llguidance's dialect of Lark, beginning with the rule `start`."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as its author wrote it. Raises InvalidGrammar if it is too long."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        num_bytes = len(self.text.encode(errors="surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"{num_bytes} bytes are more than {MAX_GRAMMAR_BYTES}")
