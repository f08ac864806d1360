"""Outputs that may reason before a constrained answer, according to llguidance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from loraplex.api.tools.answer_plan import plan_answer
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import (
    GRANITE_THINK,
    HUNYUAN_THINK,
    MISTRAL_THINK,
    THINK,
    Beginning,
    ReasoningFormat,
)
from loraplex.api.tools.reasoning_grammar import grammar_after_reasoning
from loraplex.api.tools.tool import Tool, ToolUse
from loraplex.api.tools.tool_format import HERMES
from loraplex.engine.errors import InvalidGrammar
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.text.tokenizer import Tokenizer
from support.models import save_byte_tokenizer

llguidance = pytest.importorskip("llguidance", reason="grammars need llguidance")

NUMBER = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
ANSWERS = [
    (GrammarSpec(GrammarKind.JSON_SCHEMA, NUMBER), '{"n": 3}'),
    (GrammarSpec(GrammarKind.JSON_OBJECT), '{"a": [1]}'),
    (GrammarSpec(GrammarKind.REGEX, "a/b\\/c\n[\\]/]x\\\n"), "a/b/c\n/x\n"),
    (GrammarSpec(GrammarKind.CHOICE, json.dumps(["yes", 'nö\n"\\/'])), 'nö\n"\\/'),
    (GrammarSpec(GrammarKind.LARK, 'start: A "x"\nA: "a" // }'), "ax"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With the markers of Mistral as special tokens."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    tokenizer = Tokenizer(path)
    special = [AddedToken(marker, special=True) for marker in MISTRAL_THINK.markers]
    tokenizer.backend.add_special_tokens(special)
    tokenizer.backend.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def accepts(tokenizer: Tokenizer, spec: GrammarSpec, output: str) -> bool:
    """Whether the whole output follows the grammar."""
    vocabulary = llguidance.LLTokenizer(tokenizer.backend.to_str())
    grammar = llguidance.LLMatcher.grammar_from_lark(spec.text)
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.backend.encode(output, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("written", [THINK, GRANITE_THINK, MISTRAL_THINK, HUNYUAN_THINK])
@pytest.mark.parametrize(("answer", "text"), ANSWERS, ids=[a[0].kind.value for a in ANSWERS])
@pytest.mark.parametrize("beginning", [Beginning.REASONING, Beginning.EITHER])
def test_the_answer_is_constrained_and_the_reasoning_is_not(
    tokenizer: Tokenizer,
    written: ReasoningFormat,
    answer: GrammarSpec,
    text: str,
    beginning: Beginning,
) -> None:
    spec = grammar_after_reasoning(answer, Reasoning(written, beginning), tokenizer)
    opening = written.opening if beginning is Beginning.EITHER else ""
    for reasoning in ("", "\nHm { < 4?\n"):
        for blanks in ("", "\n\n"):
            before = f"{opening}{reasoning}{written.closing}{blanks}"
            assert accepts(tokenizer, spec, before + text)
            assert not accepts(tokenizer, spec, before + "zz")
    assert accepts(tokenizer, spec, text) == (beginning is Beginning.EITHER)


@pytest.mark.parametrize(("answer", "text"), ANSWERS, ids=[a[0].kind.value for a in ANSWERS])
def test_an_answer_may_be_between_the_markers_of_its_format(
    tokenizer: Tokenizer, answer: GrammarSpec, text: str
) -> None:
    reasoning = Reasoning(HUNYUAN_THINK, Beginning.EITHER)
    spec = grammar_after_reasoning(answer, reasoning, tokenizer)
    before = "<think>\nHm.\n</think>\n<answer>\n"
    assert accepts(tokenizer, spec, f"{before}{text}\n</answer>")
    assert accepts(tokenizer, spec, f"<answer>{text}</answer>")
    assert not accepts(tokenizer, spec, f"{before}zz\n</answer>")
    assert not accepts(tokenizer, spec, f"{before}{text}")


def test_without_reasoning_the_grammar_is_the_answers(tokenizer: Tokenizer) -> None:
    for answer, _ in ANSWERS:
        reasoning = Reasoning(THINK, Beginning.ANSWER)
        assert grammar_after_reasoning(answer, reasoning, tokenizer) is answer


@pytest.mark.parametrize(
    "answer",
    [
        GrammarSpec(GrammarKind.JSON_SCHEMA, "{"),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"not": ' * 70 + "{}" + "}" * 70),
        GrammarSpec(GrammarKind.CHOICE, "[]"),
    ],
)
def test_an_invalid_grammar_is_invalid_after_reasoning(
    tokenizer: Tokenizer, answer: GrammarSpec
) -> None:
    with pytest.raises(InvalidGrammar):
        grammar_after_reasoning(answer, Reasoning(THINK, Beginning.REASONING), tokenizer)


def test_a_required_call_may_be_reasoned_about(tokenizer: Tokenizer) -> None:
    use = ToolUse(
        [Tool("f", None, json.loads(NUMBER), is_strict=True)],
        frozenset({"f"}),
        is_required=True,
        is_parallel=False,
    )
    plan = plan_answer(
        use,
        lambda: HERMES,
        tokenizer,
        form_grammar=None,
        answer_schema=None,
        reasoning=Reasoning(THINK, Beginning.REASONING),
    )
    assert plan.grammar is not None
    call = HERMES.write([("f", {"n": 3})])
    assert accepts(tokenizer, plan.grammar, f"Which one? f.\n</think>\n\n{call}")
    assert not accepts(tokenizer, plan.grammar, "Which one?</think>None.")
    assert not accepts(tokenizer, plan.grammar, call)
