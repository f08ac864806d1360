"""Grammars that enforce function calls where the request requires them.

They are written in llguidance's dialect of Lark: `%json` stands for a value that a schema
describes, `<[7]>` for the token 7, which is how special tokens are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...engine.grammars.spec import GrammarKind, GrammarSpec
from ...engine.text.tokenizer import Tokenizer
from .call_spelling import PythonicSpelling, TaggedSpelling
from .pythonic_grammar import pythonic_rules
from .tagged_grammar import TaggedRules
from .tool import NO_ARGUMENTS, Tool, ToolUse
from .tool_format import ToolFormat

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line, as programs write it: if whitespace is free, an uncertain model generates
whitespace without end."""
_NUMBER = "/[0-9]{1,4}/"


def needs_grammar(use: ToolUse) -> bool:
    """Whether the model could violate the request without a grammar."""
    return use.is_required or not use.is_parallel or any(t.is_strict for t in use.callable_tools)


def call_grammar(
    use: ToolUse,
    written: ToolFormat,
    tokenizer: Tokenizer,
    *,
    answer_schema: Mapping[str, Any] | None = None,
) -> GrammarSpec:
    """The grammar of an answer to this request: calls or, unless they are required, text.

    `answer_schema`: the schema of that text; None: it is free. Raises InvalidGrammar if the schemas
    together are too long.
    """
    spelled = _Spelling(written, tokenizer)
    rules = _call_rules(use, spelled)
    if use.is_required:
        rules["start"] = f"{spelled.opening} calls"
    elif answer_schema is not None:
        rules["start"] = f"answer | {spelled.opening} calls"
        rules["answer"] = as_json(answer_schema)
    else:
        rules.update(_free_text_rules(spelled))
    text = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
    return GrammarSpec(GrammarKind.LARK, text + "\n")


def enforced_calls(
    use: ToolUse, written: ToolFormat, tokenizer: Tokenizer
) -> tuple[str, dict[str, str]]:
    """The symbols of calls, from the marker before them on, and the rules that these use."""
    spelled = _Spelling(written, tokenizer)
    return f"{spelled.opening} calls", _call_rules(use, spelled)


class _Spelling:
    """A format's texts as Lark, its special tokens as tokens."""

    def __init__(self, written: ToolFormat, tokenizer: Tokenizer) -> None:
        self.format = written
        self._token_ids = tokenizer.special_token_ids_of(written.markers)
        self.opening = "" if written.bare else self.literal(written.opening)
        self.is_opening_special = self.is_special(written.opening)

    def is_special(self, text: str) -> bool:
        """Whether a marker is a special token."""
        return text in self._token_ids

    def head(self, name: str) -> str:
        """The text before a call's arguments; it may have a number."""
        pieces = self.format.spelling.head(name, "\0").split("\0")
        return f" {_NUMBER} ".join(self.literal(piece) for piece in pieces)

    def literal(self, text: str) -> str:
        """A text; the empty text is no symbol at all."""
        markers = sorted(self._token_ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, markers)) or "(?!)"
        pieces = re.split(f"({pattern})", text)
        return " ".join(self._symbol(piece) for piece in pieces if piece)

    def _symbol(self, piece: str) -> str:
        token_id = self._token_ids.get(piece)
        return json.dumps(piece) if token_id is None else f"<[{token_id}]>"


def _call_rules(use: ToolUse, spelled: _Spelling) -> dict[str, str]:
    written = spelled.format
    tools = use.callable_tools
    between = f"({spelled.literal(written.between)} call)*" if use.is_parallel else ""
    rules = {
        "calls": f"{spelled.literal(written.before)} call {between} "
        f"{spelled.literal(written.after)}",
        "call": " | ".join(f"call_{index}" for index in range(len(tools))),
    }
    for index, tool in enumerate(tools):
        head = spelled.head(tool.name)
        tail = spelled.literal(written.spelling.tail)
        rules[f"call_{index}"] = f"{head} arguments_{index} {tail}"
        rules |= _arguments_rules(f"arguments_{index}", use, tool, spelled)
    return rules


def _arguments_rules(name: str, use: ToolUse, tool: Tool, spelled: _Spelling) -> dict[str, str]:
    schema, spelling = _arguments_schema(use, tool), spelled.format.spelling
    if isinstance(spelling, PythonicSpelling):
        return pythonic_rules(name, schema, as_json=as_json)
    if not isinstance(spelling, TaggedSpelling):
        return {name: as_json(schema)}
    rules = TaggedRules(
        spelling, literal=spelled.literal, as_json=as_json, is_special=spelled.is_special
    )
    return rules.of(name, schema, is_strict=tool.is_strict)


def _arguments_schema(use: ToolUse, tool: Tool) -> Mapping[str, Any]:
    """A tool that is not strict may be called with any object, unless it must be called or takes no
    arguments."""
    is_followed = tool.is_strict or use.is_required or tool.parameters == NO_ARGUMENTS
    return tool.parameters if is_followed else ANY_OBJECT


def _free_text_rules(spelled: _Spelling) -> dict[str, str]:
    """Free text up to the first opening, followed by calls."""
    written = spelled.format
    if written.bare:
        return {"start": "FREE | calls", "FREE": f"/{written.bare.free}/"}
    if spelled.is_opening_special:
        return {"start": f"FREE | FREE {spelled.opening} calls", "FREE": "/(.|\\n)*/"}
    opening = re.escape(written.opening).replace("/", "\\/")
    return {
        "start": "FREE | opened calls",
        "opened[lazy]": f"/(.|\\n)*{opening}/",
        "FREE": f"/(.|\\n)*/ & ~/(.|\\n)*{opening}(.|\\n)*/",
    }


def as_json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPELLING})
