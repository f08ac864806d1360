"""Grammars of outputs whose answer is constrained and whose reasoning is free."""

from __future__ import annotations

import json
import re

from ...engine.grammars.limits import check_schema, read_choices, read_schema
from ...engine.grammars.spec import GrammarKind, GrammarSpec
from ...engine.text.tokenizer import Tokenizer
from .call_grammar import ANY_OBJECT, as_json
from .reasoning import Reasoning
from .reasoning_format import Beginning, Frame

_BLANKS = "/[ \\t\\r\\n]{1,8}/"
"""Bounded: an uncertain model could write blanks without end."""


def grammar_after_reasoning(
    answer: GrammarSpec, reasoning: Reasoning, tokenizer: Tokenizer
) -> GrammarSpec:
    """The grammar of an output that may reason freely before an answer that follows `answer`.

    Raises InvalidGrammar for an answer's grammar that is malformed or too long.
    """
    if reasoning.beginning is Beginning.ANSWER:
        return answer
    written = reasoning.format
    opening, closing = (marker_symbol(m, tokenizer) for m in (written.opening, written.closing))
    is_optional = reasoning.beginning is Beginning.EITHER
    rules = {
        "start": f"({opening} reasoning)? framed" if is_optional else "reasoning framed",
        **_reasoning_rules(closing, written.closing),
        "framed": _framed_rule(written.frame, tokenizer),
        "BLANKS": _BLANKS,
        "answer": answer_rule(answer),
    }
    text = "\n".join(f"{name}: {rule}" for name, rule in rules.items())
    return GrammarSpec(GrammarKind.LARK, text + "\n")


def marker_symbol(text: str, tokenizer: Tokenizer) -> str:
    """A marker in Lark: a token if it is a special one."""
    token_id = tokenizer.special_token_ids_of([text]).get(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _reasoning_rules(closing: str, text: str) -> dict[str, str]:
    if closing != json.dumps(text):
        return {"reasoning": f"FREE {closing} BLANKS?", "FREE": "/(.|\\n)*/"}
    pattern = re.escape(text).replace("/", "\\/")
    return {"reasoning": "closed BLANKS?", "closed[lazy]": f"/(.|\\n)*{pattern}/"}


def _framed_rule(frame: Frame | None, tokenizer: Tokenizer) -> str:
    """The answer in its frame, or without one: readers accept both."""
    if frame is None:
        return "answer"
    opening, closing = (marker_symbol(marker, tokenizer) for marker in frame)
    return f"answer | {opening} BLANKS? answer BLANKS? {closing}"


def answer_rule(answer: GrammarSpec) -> str:
    """A grammar of any kind as the right side of a rule. Raises InvalidGrammar."""
    match answer.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = read_schema(answer)
            check_schema(schema)
            return as_json(schema)
        case GrammarKind.JSON_OBJECT:
            return as_json(ANY_OBJECT)
        case GrammarKind.CHOICE:
            return " | ".join(json.dumps(choice) for choice in read_choices(answer))
        case GrammarKind.REGEX:
            return f"/{_escaped(answer.text)}/"
        case GrammarKind.LARK:
            return f"%lark {{\n{answer.text}\n}}"


def _escaped(regex: str) -> str:
    """A regular expression between slashes on one line."""
    pieces: list[str] = []
    is_escaped = False
    for char in regex:
        match char:
            case "/" if not is_escaped:
                pieces.append("\\/")
            case "\n":
                pieces.append("n" if is_escaped else "\\n")
            case _:
                pieces.append(char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(pieces)
