"""How an answer is constrained by a grammar, and how it is parsed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...engine.grammars.spec import GrammarSpec
from ...engine.text.tokenizer import Tokenizer
from ..contract.errors import ApiError
from .answer_reader import AnswerReader
from .call_grammar import call_grammar, enforced_calls, needs_grammar
from .harmony import HARMONY_MARKERS
from .harmony_grammar import harmony_grammar
from .harmony_reader import HarmonyReader
from .reader import Reader
from .readers import TextReader, read_after_reasoning
from .reasoning import Reasoning
from .reasoning_format import Beginning
from .reasoning_grammar import grammar_after_reasoning
from .tool import ToolUse
from .tool_format import OPENAI, ToolFormat


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The constraint for the engine, and the parser of each answer."""

    grammar: GrammarSpec | None
    visible_token_ids: Collection[int] = ()
    """Special tokens that mark calls and reasoning: they have to be seen."""
    make_reader: Callable[[], Reader] = TextReader
    may_call: bool = False
    reasoning: Reasoning | None = None
    """None: outputs are answers only."""


def plan_answer(
    use: ToolUse | None,
    written: Callable[[], ToolFormat],
    tokenizer: Tokenizer,
    *,
    form_grammar: GrammarSpec | None,
    answer_schema: Mapping[str, Any] | None,
    reasoning: Reasoning | None = None,
) -> AnswerPlan:
    """`written` is called only if there are tools. The text of an answer follows `form_grammar`,
    which is that of `answer_schema` if there is one. `reasoning`: it may precede the answer.

    Raises ApiError if the base's call format is unknown or incompatible with the output format,
    InvalidGrammar if a grammar is malformed or too long.
    """
    if reasoning is not None and reasoning.format.has_channels:
        return _plan_channels(use, tokenizer, reasoning, form_grammar=form_grammar)
    plan = _plan_answer(
        use, written, tokenizer, form_grammar=form_grammar, answer_schema=answer_schema
    )
    return plan if reasoning is None else _after_reasoning(plan, reasoning, tokenizer)


def _after_reasoning(plan: AnswerPlan, reasoning: Reasoning, tokenizer: Tokenizer) -> AnswerPlan:
    grammar = plan.grammar and grammar_after_reasoning(plan.grammar, reasoning, tokenizer)
    markers = tokenizer.special_token_ids_of(reasoning.format.markers).values()
    return replace(
        plan,
        grammar=grammar,
        visible_token_ids=frozenset((*plan.visible_token_ids, *markers)),
        make_reader=lambda: read_after_reasoning(reasoning, plan.make_reader()),
        reasoning=reasoning,
    )


def _plan_channels(
    use: ToolUse | None,
    tokenizer: Tokenizer,
    reasoning: Reasoning,
    *,
    form_grammar: GrammarSpec | None,
) -> AnswerPlan:
    """For outputs in harmony, whose channels are reasoning, answer and calls."""
    names = () if use is None else use.callable_names
    return AnswerPlan(
        _channels_grammar(use, tokenizer, reasoning, form_grammar),
        visible_token_ids=tokenizer.special_token_ids_of(HARMONY_MARKERS).values(),
        make_reader=lambda: HarmonyReader(reasoning, names),
        may_call=use is not None,
        reasoning=reasoning,
    )


def _channels_grammar(
    use: ToolUse | None,
    tokenizer: Tokenizer,
    reasoning: Reasoning,
    form_grammar: GrammarSpec | None,
) -> GrammarSpec | None:
    if form_grammar is None and (use is None or not needs_grammar(use)):
        return None
    if reasoning.beginning is Beginning.ANSWER:
        return form_grammar
    if use is None:
        return harmony_grammar(tokenizer, answer=form_grammar)
    calls, rules = enforced_calls(use, OPENAI, tokenizer)
    return harmony_grammar(
        tokenizer, answer=form_grammar, calls=calls, rules=rules, must_call=use.is_required
    )


def _plan_answer(
    use: ToolUse | None,
    written: Callable[[], ToolFormat],
    tokenizer: Tokenizer,
    *,
    form_grammar: GrammarSpec | None,
    answer_schema: Mapping[str, Any] | None,
) -> AnswerPlan:
    if use is None:
        return AnswerPlan(form_grammar)
    tool_format = written()
    if answer_schema is not None and tool_format.is_plain_json and not use.is_required:
        raise ApiError(
            "unsupported_parameter",
            "tools: this base writes calls as plain JSON, so an answer that is JSON itself cannot "
            "be told from them; require a call, or leave the form of the answer free",
            param="tools",
        )
    schemas = {tool.name: tool.parameters for tool in use.callable_tools}
    grammar = None
    if needs_grammar(use) or answer_schema is not None:
        grammar = call_grammar(use, tool_format, tokenizer, answer_schema=answer_schema)
    return AnswerPlan(
        grammar,
        visible_token_ids=tokenizer.special_token_ids_of(tool_format.markers).values(),
        make_reader=lambda: AnswerReader(tool_format, use.callable_names, schemas),
        may_call=True,
    )
