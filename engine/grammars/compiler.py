"""Compiles a grammar's text with llguidance.

Imported only if grammars are supported, because the library is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import llguidance

from ..errors import InvalidGrammar
from .limits import check_grammar, read_choices
from .matcher import Automaton, Executor
from .spec import GrammarKind, GrammarSpec

ANY_OBJECT = '{"type": "object"}'
MAX_ITEMS_IN_ROW = 20_000
"""An object of 500 properties, none of them required, takes some 2,000."""
MAX_LEXER_STATES = 50_000
"""Each has 1 to 2 kB."""
MAX_MESSAGE_CHARACTERS = 500


class TokenBytes(Protocol):
    """The vocabulary interface of `llguidance.LLTokenizer`."""

    is_tokenizer_wrapper: bool
    bos_token_id: int | None
    eos_token_id: int
    tokens: Sequence[bytes]
    """The bytes of each token id; for a special token its name."""
    special_token_ids: Sequence[int]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar leaves no choice about."""
        ...


class GrammarCompiler:
    """For one vocabulary."""

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._tokenizer = llguidance.LLTokenizer(cast(llguidance.TokenizerWrapper, vocabulary))
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, spec: GrammarSpec) -> Automaton:
        """The automaton at the grammar's beginning. Nearly all of it is done without the
        interpreter's lock. Raises InvalidGrammar, in the library's words where they are its."""
        check_grammar(spec)
        try:
            text = _as_llguidance(spec)
        except ValueError as exc:
            raise _invalid(spec, str(exc)) from exc
        automaton = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if automaton.is_error():
            raise _invalid(spec, automaton.get_error())
        automaton.compute_bitmask()
        if automaton.is_error():
            raise _invalid(spec, "no output can follow it, or its first token takes too much work")
        return automaton


def make_executor() -> Executor:
    """With as many threads as the machine has cores to spare."""
    return cast(Executor, llguidance.LLExecutor())


def _as_llguidance(spec: GrammarSpec) -> str:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            return _from_schema(spec.text or ANY_OBJECT)
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(spec.text)
        case GrammarKind.CHOICE:
            choices = "|".join(map(_quoted, read_choices(spec)))
            return llguidance.LLMatcher.grammar_from_regex(choices)
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(spec.text)


def _from_schema(schema: str) -> str:
    """JSON on one line, as programs write it, unless the schema's own `x-guidance` differs: if
    whitespace is free, an uncertain model generates whitespace without end. Unsupported parts are
    refused."""
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema,
        defaults={
            "whitespace_flexible": False,
            "item_separator": ", ?",
            "key_separator": ": ?",
        },
        overrides={"lenient": False},
    )


def _quoted(text: str) -> str:
    """A regular expression that matches just this text."""
    return "".join(char if char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def _invalid(spec: GrammarSpec, reason: str) -> InvalidGrammar:
    first = " ".join(reason.replace("<non-verbose/>", "").split())[:MAX_MESSAGE_CHARACTERS]
    return InvalidGrammar(f"the {spec.kind.value}: {first}")
