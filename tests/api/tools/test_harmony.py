"""Outputs in harmony, gpt-oss's format: read, counted and constrained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from loraplex.api.inference.reasoning_count import count_reasoning
from loraplex.api.tools.answer_part import ArgumentsText, CallOpened, ReasoningText, Text
from loraplex.api.tools.answer_plan import AnswerPlan, plan_answer
from loraplex.api.tools.chat_prompt import ChatPrompts
from loraplex.api.tools.conversation import ChatMessage, PastCall
from loraplex.api.tools.harmony import HARMONY_MARKERS
from loraplex.api.tools.harmony_reader import HarmonyReader
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import HARMONY, Beginning
from loraplex.api.tools.tool import Tool, ToolUse
from loraplex.api.tools.tool_format import OPENAI
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.text.tokenizer import Tokenizer
from support.chat_templates import HARMONY_TEMPLATE
from support.models import save_byte_tokenizer

EITHER = Reasoning(HARMONY, Beginning.EITHER)
NAMES = {"f", "get-weather_2"}
Read = tuple[str, str, list[tuple[str, str]]]
"""The reasoning, the text, and the calls."""
CHANNELS = ("analysis", "commentary", "final")
THOUGHT = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def read(pieces: list[str], reasoning: Reasoning = EITHER) -> Read:
    reader = HarmonyReader(reasoning, NAMES)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    said = {ReasoningText: "", Text: ""}
    calls = list[tuple[str, str]]()
    for part in parts:
        match part:
            case ReasoningText(text) | Text(text):
                said[type(part)] += text
            case CallOpened(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsText(index, text):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    assert reader.num_calls == len(calls)
    return said[ReasoningText], said[Text], calls


TRANSCRIPTS: list[tuple[str, Read]] = [
    (f"{THOUGHT}{FINAL}No.<|return|>", ("Rain?", "No.", [])),
    (f"{THOUGHT}{FINAL} a < b \n", ("Rain?", " a < b \n", [])),
    (
        f"{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"city": "<|x|>"}<|call|>',
        ("Rain?", "", [("f", '{"city": "<|x|>"}')]),
    ),
    (
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        ("", "", [("f", "{}")]),
    ),
    (
        "<|channel|>commentary to=functions.get-weather_2<|constrain|>json<|message|><|call|>",
        ("", "", [("get-weather_2", "{}")]),
    ),
    (
        "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
        ("", "", [("f", "{}")]),
    ),
    (
        f"{THOUGHT}<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
        f"<|channel|>analysis<|message|>Now f.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        ("Rain?\nNow f.", "One moment.", [("f", '{"a": 1}')]),
    ),
    (
        f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{FINAL}Second.",
        ("", "First.\nSecond.", []),
    ),
    (
        "<|channel|>commentary to=python code<|message|>1 + 1<|call|>",
        ("", "<|channel|>commentary to=python code<|message|>1 + 1", []),
    ),
    (
        "<|channel|>commentary to=functions.h <|constrain|>json<|message|>{}<|call|>",
        ("", "<|channel|>commentary to=functions.h <|constrain|>json<|message|>{}", []),
    ),
    ("Just text <b>.", ("", "Just text <b>.", [])),
    ("", ("", "", [])),
    (" \n", ("", " \n", [])),
    ("<|channel|>ana", ("", "", [])),
    ("<|channel|>analysis<|message|>cut <|en", ("cut <|en", "", [])),
    ("<|channel|>new<|message|>x", ("", "x", [])),
    (f"{FINAL}a<|end|> \n", ("", "a", [])),
    (f"{FINAL}a<|end|>b", ("", "a\nb", [])),
    (f"{FINAL}a<|start|>assistant<|channel|>analysis<|message|>b", ("b", "a", [])),
    ("<|channel|>" + "x" * 600, ("", "<|channel|>" + "x" * 600, [])),
    (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Os',
        ("", "", [("f", '{"city": "Os')]),
    ),
]


@pytest.mark.parametrize(("output", "expected"), TRANSCRIPTS)
def test_messages_are_read_by_their_channels_wherever_they_are_split(
    output: str, expected: Read
) -> None:
    assert read([output]) == expected
    assert read(list(output)) == expected
    for cut in range(len(output)):
        assert read([output[:cut], output[cut:]]) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *HARMONY_MARKERS,
                *("analysis", "final", "commentary", " to=functions.f", "to=", "json", "{}"),
                *("assistant", "<|", "<", "x", " ", "\n", "<|chan"),
            ]
        ),
        max_size=14,
    )
)
def test_the_pieces_never_matter(pieces: list[str]) -> None:
    whole = read(["".join(pieces)])
    assert read(pieces) == whole
    assert read(list("".join(pieces))) == whole


@settings(max_examples=100, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.sampled_from(CHANNELS), st.text("ab <|\n", max_size=5)),
        min_size=1,
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6).map(sorted),
)
def test_messages_are_joined_by_their_kind(
    messages: list[tuple[str, str]], cuts: list[int]
) -> None:
    output = "<|end|><|start|>assistant".join(
        f"<|channel|>{channel}<|message|>{text}" for channel, text in messages
    )
    pieces = [output[i:j] for i, j in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    reasoning, said, calls = read(pieces)
    told = [text for channel, text in messages if channel == "analysis" and text]
    assert reasoning == "\n".join(told)
    assert said == "\n".join(text for channel, text in messages if channel != "analysis" and text)
    assert not calls


def test_what_the_template_writes_is_read(tmp_path: Path) -> None:
    """The template of gpt-oss, as a reference for the messages of the assistant."""
    save_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(HARMONY_TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    tool = Tool("f", None, {"type": "object", "properties": {}}, is_strict=False)
    call = PastCall("c1", "f", {"city": "Köln", "days": [1, None]})
    talk = [
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", calls=(call,), reasoning="I look."),
        ChatMessage("tool", "rain", call_id="c1", tool_name="f"),
        ChatMessage("assistant", "It rains."),
    ]
    ids = ChatPrompts(tokenizer).encode(talk, [tool])
    prompt = tokenizer.backend.decode(ids, skip_special_tokens=False)
    turns = re.split(r"<\|start\|>(?:user|functions\.f to=assistant)", prompt)[1:]
    outputs = [turn.partition("<|end|><|start|>assistant")[2] for turn in turns]
    assert read([outputs[0]]) == ("I look.", "", [("f", '{"city": "Köln", "days": [1, null]}')])
    assert read([outputs[1].removesuffix("<|start|>assistant")]) == ("", "It rains.", [])


def test_reasoning_that_is_not_returned_is_separated_all_the_same() -> None:
    hidden = Reasoning(HARMONY, Beginning.EITHER, is_returned=False)
    assert read([f"{THOUGHT}{FINAL}No."], hidden) == ("", "No.", [])


def test_an_output_may_continue_an_answer() -> None:
    assert read([" and<|return|>"], Reasoning(HARMONY, Beginning.ANSWER)) == ("", " and", [])


def tokens_of(output: str) -> list[str]:
    """A token for each marker, and one for each other character."""
    return re.findall("|".join(map(re.escape, HARMONY_MARKERS)) + r"|(?s:.)", output)


def test_the_tokens_of_all_reasoning_are_counted() -> None:
    first, text, second = (
        "<|channel|>analysis<|message|>ab<|end|>",
        "<|start|>assistant<|channel|>commentary<|message|>c<|end|>",
        "<|start|>assistant<|channel|>analysis<|message|>d<|end|>",
    )
    count = count_reasoning(EITHER)
    for token in tokens_of(first + text + second + f"<|start|>assistant{FINAL}e"):
        count.push(token)
    assert count.num_tokens == len(tokens_of(first)) + len(tokens_of(second))
    cut = count_reasoning(EITHER)
    for token in tokens_of("<|channel|>analysis<|message|>ab"):
        cut.push(token)
    assert cut.num_tokens == len(tokens_of("<|channel|>analysis<|message|>ab"))
    plain = count_reasoning(EITHER)
    for token in tokens_of(f"{FINAL}e"):
        plain.push(token)
    assert plain.num_tokens == 0


llguidance = pytest.importorskip("llguidance", reason="grammars need llguidance")
NUMBER = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
TOOL = Tool(
    "f",
    None,
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    is_strict=True,
)
CALLED = OPENAI.write([("f", {"city": "x"})])


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """With the markers as special tokens, and without."""
    path: Path = tmp_path_factory.mktemp("harmony")
    save_byte_tokenizer(path)
    base = Tokenizer(path)
    if request.param:
        base.backend.add_special_tokens([AddedToken(m, special=True) for m in HARMONY_MARKERS])
        base.backend.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def plan_of(
    tokenizer: Tokenizer,
    use: ToolUse | None,
    form: GrammarSpec | None,
    beginning: Beginning = Beginning.EITHER,
) -> AnswerPlan:
    return plan_answer(
        use,
        lambda: OPENAI,
        tokenizer,
        form_grammar=form,
        answer_schema=None,
        reasoning=Reasoning(HARMONY, beginning),
    )


def accepts(tokenizer: Tokenizer, plan: AnswerPlan, output: str) -> bool:
    assert plan.grammar is not None
    vocabulary = llguidance.LLTokenizer(tokenizer.backend.to_str())
    grammar = llguidance.LLMatcher.grammar_from_lark(plan.grammar.text)
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.backend.encode(output, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def use_of(*, is_required: bool = False) -> ToolUse:
    return ToolUse([TOOL], frozenset({"f"}), is_required=is_required, is_parallel=True)


def test_a_form_constrains_the_final_channel_alone(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, None, GrammarSpec(GrammarKind.JSON_SCHEMA, NUMBER))
    for before in ("", THOUGHT, THOUGHT + THOUGHT.replace("analysis", "commentary")):
        assert accepts(tokenizer, plan, before + FINAL + '{"n": 3}')
        assert not accepts(tokenizer, plan, before + FINAL + '{"n": "x"}')
    assert not accepts(tokenizer, plan, '{"n": 3}')
    assert not accepts(tokenizer, plan, THOUGHT)


def test_a_required_call_may_be_reasoned_about(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, use_of(is_required=True), None)
    assert accepts(tokenizer, plan, CALLED)
    assert accepts(tokenizer, plan, THOUGHT + CALLED)
    assert not accepts(tokenizer, plan, THOUGHT + FINAL + "No.")
    assert not accepts(tokenizer, plan, CALLED.replace("city", "town"))
    assert not accepts(tokenizer, plan, CALLED.replace("functions.f", "functions.g"))


def test_a_strict_tool_leaves_the_answer_free(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, use_of(), None)
    assert accepts(tokenizer, plan, THOUGHT + FINAL + "Any < text\n")
    assert accepts(tokenizer, plan, THOUGHT + CALLED)
    assert not accepts(tokenizer, plan, THOUGHT + CALLED.replace("city", "town"))


def test_an_answer_with_a_form_is_that_or_a_call(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, use_of(), GrammarSpec(GrammarKind.JSON_SCHEMA, NUMBER))
    assert accepts(tokenizer, plan, THOUGHT + FINAL + '{"n": 3}')
    assert accepts(tokenizer, plan, THOUGHT + CALLED)
    assert not accepts(tokenizer, plan, THOUGHT + FINAL + "Hello")


def test_nothing_is_constrained_without_need(tokenizer: Tokenizer) -> None:
    free = ToolUse(
        [Tool("f", None, {}, is_strict=False)],
        frozenset({"f"}),
        is_required=False,
        is_parallel=True,
    )
    plan = plan_of(tokenizer, free, None)
    assert plan.grammar is None
    assert plan.may_call
    assert plan_of(tokenizer, None, None).grammar is None
    form = GrammarSpec(GrammarKind.JSON_SCHEMA, NUMBER)
    assert plan_of(tokenizer, None, form, Beginning.ANSWER).grammar is form
