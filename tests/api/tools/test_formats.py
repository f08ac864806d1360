"""Answers with calls as chats and responses: streams assembled by the client's own code."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from openai import NOT_GIVEN
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import AddedToken

from loraplex.api.formats.chat import ChatFormat
from loraplex.api.formats.messages import MessageBlocks
from loraplex.api.formats.responses import ResponsesFormat
from loraplex.api.http.json_response import encode_json
from loraplex.api.inference.order import Order
from loraplex.api.inference.sequence_text import Delta
from loraplex.api.inference.served_models import ServedModel
from loraplex.api.schemas.answers import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from loraplex.api.schemas.responses import ResponsesBody
from loraplex.api.tools.answer_plan import AnswerPlan, plan_answer
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import HARMONY, THINK, Beginning
from loraplex.api.tools.tool import Tool, ToolUse
from loraplex.api.tools.tool_format import HERMES, MISTRAL, OPENAI, TOOL_FORMATS, ToolFormat
from loraplex.engine.messages import FinishReason, TokenLogprob, TokenLogprobs, TokensGenerated
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from support.models import save_byte_tokenizer
from support.scripted_generation import PROMPT, Scenario, finished, run, started

ANYTHING = {"type": "object"}
USE = ToolUse(
    [Tool(name, None, ANYTHING, is_strict=False) for name in ("f", "g")],
    frozenset({"f", "g"}),
    is_required=False,
    is_parallel=True,
)
CALLS = HERMES.write([("f", {"a": "ü"}), ("g", {})])
ANSWERS = [
    "Just text, in the end.\n",
    CALLS,
    f"Let me see.\n\n{CALLS}",
    f"{CALLS}\nThat was it.",
    f"One {HERMES.write([('f', {'n': 1})])} and {HERMES.write([('g', {'n': 2})])}\n",
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2',
    "",
    "<think>\nShould I call f? ü\n</think>\n\nNo.",
    f"<think>I call f.</think>Let me see. {CALLS}",
    f"<think></think>{CALLS}",
    "<think>Still reasoning",
]
USAGE = Usage(3, 9, 12, PromptTokensDetails(0), CompletionTokensDetails(0, 0))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With a marker that is a special token."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    tokenizer = Tokenizer(path)
    tokenizer.backend.add_special_tokens([AddedToken(MISTRAL.opening, special=True)])
    tokenizer.backend.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def plan_of(tokenizer: Tokenizer, written: ToolFormat, *, is_returned: bool = True) -> AnswerPlan:
    return plan_answer(
        USE,
        lambda: written,
        tokenizer,
        form_grammar=None,
        answer_schema=None,
        reasoning=Reasoning(THINK, Beginning.EITHER, is_returned),
    )


def deltas_of(
    tokenizer: Tokenizer, plan: AnswerPlan, answer: str, cuts: Sequence[int], reason: FinishReason
) -> list[Delta]:
    """What the generation says if the engine gives the answer's tokens in these pieces."""
    ids = tokenizer.backend.encode(answer, add_special_tokens=False).ids
    pieces = [ids[i:j] for i, j in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    events = [
        TokensGenerated("r", piece, [TokenLogprobs(TokenLogprob(t, -1.0), []) for t in piece])
        for piece in pieces
    ]
    scenario = Scenario(
        tokenizer,
        [started(), *events, finished(reason)],
        visible_token_ids=plan.visible_token_ids,
        num_logprobs=0,
    )
    deltas: list[Delta] = run(scenario.deltas())
    return deltas


def order() -> Order:
    return cast(
        Order,
        SimpleNamespace(
            request_id="r",
            model=ServedModel("m", None),
            sampling=SamplingParams(num_logprobs=0),
            prompts=[PROMPT],
            num_choices=1,
        ),
    )


def cuts_of(answer: str, seed: int) -> list[int]:
    generator = random.Random(seed)
    return sorted(generator.sample(range(len(answer) + 1), min(len(answer), 6)))


def streamed_chat(form: ChatFormat, deltas: Sequence[Delta]) -> ChatCompletion:
    """As the client's helper puts the chunks together."""
    state: Any = ChatCompletionStreamState()
    chunks = [*form.opening(), *(chunk for delta in deltas for chunk in form.chunks(delta))]
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(encode_json(chunk)))
    snapshot: ChatCompletion = state.current_completion_snapshot
    return snapshot


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_streamed_chat_is_the_whole_one(tokenizer: Tokenizer, answer: str, seed: int) -> None:
    plan = plan_of(tokenizer, HERMES)
    deltas = deltas_of(tokenizer, plan, answer, cuts_of(answer, seed), FinishReason.STOP)

    def form() -> ChatFormat:
        return ChatFormat(order(), plan, tokenizer, streams_usage=False)

    whole = ChatCompletion.model_validate_json(encode_json(form().whole([deltas], USAGE)))
    (choice,) = whole.choices
    (streamed,) = streamed_chat(form(), deltas).choices
    assert (streamed.message.content or "") == (choice.message.content or "")
    assert _reasoning(streamed.message) == _reasoning(choice.message)
    assert bool(_reasoning(choice.message)) == ("<think>" in answer and "<think></" not in answer)
    assert _called(streamed.message) == _called(choice.message)
    assert streamed.finish_reason == choice.finish_reason
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    assert streamed.logprobs is not None
    assert choice.logprobs is not None
    assert len(streamed.logprobs.content or []) == len(choice.logprobs.content or [])
    assert bool(choice.message.tool_calls) == ("tool_call" in answer)


@pytest.mark.parametrize("written", TOOL_FORMATS.values(), ids=lambda f: str(f.name))
def test_calls_of_every_format_are_streamed_like_the_whole_ones(
    tokenizer: Tokenizer, written: ToolFormat
) -> None:
    answer = "<think>Which?</think>" + written.write([("f", {"a": "ü"}), ("g", {})])
    plan = plan_of(tokenizer, written)
    deltas = deltas_of(tokenizer, plan, answer, range(len(answer)), FinishReason.STOP)
    whole = ChatFormat(order(), plan, tokenizer, streams_usage=False).whole([deltas], USAGE)
    message = whole.choices[0].message
    assert (message.reasoning, message.content) == ("Which?", None)
    assert _called(message) == [("f", '{"a": "ü"}'), ("g", "{}")]
    form = ChatFormat(order(), plan, tokenizer, streams_usage=False)
    (streamed,) = streamed_chat(form, deltas).choices
    assert _called(streamed.message) == _called(message)
    assert streamed.finish_reason == "tool_calls"


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_streamed_response_is_the_whole_one(
    tokenizer: Tokenizer, answer: str, reason: FinishReason
) -> None:
    plan = plan_of(tokenizer, HERMES)
    deltas = deltas_of(tokenizer, plan, answer, cuts_of(answer, 5), reason)
    body = ResponsesBody.model_validate({"model": "m", "input": "hi"})

    def form() -> ResponsesFormat:
        return ResponsesFormat(body, order(), plan, tokenizer)

    whole = Response.model_validate_json(encode_json(form().whole([deltas], USAGE)))
    streaming = form()
    events = [
        *streaming.opening(),
        *(event for delta in deltas for event in streaming.chunks(delta)),
        *streaming.closing(USAGE),
    ]
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    state: Any = ResponseStreamState(input_tools=NOT_GIVEN, text_format=NOT_GIVEN)  # type: ignore[arg-type]
    *_, last = [
        fired
        for event in events
        for fired in state.handle_event(adapter.validate_json(encode_json(event)))
    ]
    assert last.type == ("response.completed" if reason == "stop" else "response.incomplete")
    assert _items(last.response) == _items(whole)
    assert whole.status == ("completed" if reason == "stop" else "incomplete")
    told = [item.type for item in whole.output]
    assert told, "an answer without a word is an empty message"
    assert told.count("function_call") == answer.count("<tool_call>")
    has_reasoning = "<think>" in answer and "<think></" not in answer
    assert told.count("reasoning") == has_reasoning
    if has_reasoning:
        assert told[0] == "reasoning"


MESSAGE_BREAK = "<|end|><|start|>assistant<|channel|>"
HARMONY_ANSWERS = [
    f"<|channel|>analysis<|message|>Which?{MESSAGE_BREAK}final<|message|>ü <b>\n<|return|>",
    f"<|channel|>commentary<|message|>I look.{MESSAGE_BREAK}analysis<|message|>Which?"
    f"{MESSAGE_BREAK}"
    'commentary to=functions.f <|constrain|>json<|message|>{"a": "ü"}<|call|>',
    "Plain.",
]


@pytest.mark.parametrize("answer", HARMONY_ANSWERS)
@pytest.mark.parametrize("seed", range(2))
def test_answers_in_channels_are_streamed_like_the_whole_ones(
    tokenizer: Tokenizer, answer: str, seed: int
) -> None:
    plan = plan_answer(
        USE,
        lambda: OPENAI,
        tokenizer,
        form_grammar=None,
        answer_schema=None,
        reasoning=Reasoning(HARMONY, Beginning.EITHER),
    )
    deltas = deltas_of(tokenizer, plan, answer, cuts_of(answer, seed), FinishReason.STOP)
    whole = ChatFormat(order(), plan, tokenizer, streams_usage=False).whole([deltas], USAGE)
    message = whole.choices[0].message
    assert (message.reasoning or "") == ("Which?" if "analysis" in answer else "")
    form = ChatFormat(order(), plan, tokenizer, streams_usage=False)
    (streamed,) = streamed_chat(form, deltas).choices
    assert (streamed.message.content or "") == (message.content or "")
    assert _reasoning(streamed.message) == (message.reasoning or "")
    assert _called(streamed.message) == _called(message)
    assert _called(message) == ([("f", '{"a": "ü"}')] if "to=" in answer else [])
    body = ResponsesBody.model_validate({"model": "m", "input": "hi"})
    response = ResponsesFormat(body, order(), plan, tokenizer).whole([deltas], USAGE)
    streaming = ResponsesFormat(body, order(), plan, tokenizer)
    chunks = [chunk for delta in deltas for chunk in streaming.chunks(delta)]
    told = [chunk.type for chunk in chunks if chunk.type == "response.output_item.done"]
    kinds = [item.type for item in response.output]
    assert len(told) == len(kinds)
    blocks = MessageBlocks()
    reader = plan.make_reader()
    for delta in deltas:
        list(blocks.push(reader.push(delta.text)))
    list(blocks.push(reader.finish()))
    list(blocks.finish())
    named = {"message": "text", "reasoning": "thinking", "function_call": "tool_use"}
    assert [block.type for block in blocks.completed] == [named[kind] for kind in kinds]
    assert kinds == [
        *(["message", "reasoning"] if "look" in answer else []),
        *(["reasoning", "message"] if "final" in answer else []),
        *(["function_call"] if "to=" in answer else []),
        *(["message"] if answer == "Plain." else []),
    ]


def test_the_response_of_text_and_calls_is_an_item_each(tokenizer: Tokenizer) -> None:
    plan = plan_of(tokenizer, HERMES)
    deltas = deltas_of(tokenizer, plan, ANSWERS[4], cuts_of(ANSWERS[4], 1), FinishReason.STOP)
    body = ResponsesBody.model_validate({"model": "m", "input": "hi"})
    whole = ResponsesFormat(body, order(), plan, tokenizer).whole([deltas], USAGE)
    said = [msgspec.to_builtins(item) for item in whole.output]
    assert [item.get("arguments") or item["content"][0]["text"] for item in said] == [
        "One",
        '{"n": 1}',
        "and",
        '{"n": 2}',
    ]
    assert len({item["id"] for item in said}) == 4


def test_markers_that_are_special_tokens_are_seen_in_requests_with_tools_alone(
    tokenizer: Tokenizer,
) -> None:
    answer = "Sure" + MISTRAL.write([("f", {"a": 1})])
    plan = plan_of(tokenizer, MISTRAL)
    assert plan.visible_token_ids
    deltas = deltas_of(tokenizer, plan, answer, [2, 5], FinishReason.STOP)
    form = ChatFormat(order(), plan, tokenizer, streams_usage=False)
    message = form.whole([deltas], USAGE).choices[0].message
    assert message.content == "Sure"
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"a": 1}']
    plain = AnswerPlan(None)
    unseen = deltas_of(tokenizer, plain, answer, [2, 5], FinishReason.STOP)
    assert MISTRAL.opening not in "".join(delta.text for delta in unseen)


def test_reasoning_is_an_item_before_the_message(tokenizer: Tokenizer) -> None:
    answer = "<think>\nShould I? Yes.\n</think>\n\nSure."
    plan = plan_of(tokenizer, HERMES)
    deltas = deltas_of(tokenizer, plan, answer, cuts_of(answer, 1), FinishReason.STOP)
    body = ResponsesBody.model_validate({"model": "m", "input": "hi"})
    form = ResponsesFormat(body, order(), plan, tokenizer)
    events = [event for delta in deltas for event in form.chunks(delta)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_text.delta", "output_text.done"),
    ]
    whole = msgspec.to_builtins(form.whole([[]], USAGE))
    reasoning, message = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Should I? Yes."}]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert message["content"][0]["text"] == "Sure."
    assert len(message["content"][0]["logprobs"]) <= len("</think>\n\nSure.")


def test_the_output_items_of_a_response_are_messages_of_the_next_prompt() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed",
         "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Yes."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
        {"type": "message", "role": "assistant", "content": "It rains."},
        {"type": "message", "role": "assistant", "content": "Really."},
        {"type": "reasoning", "summary": []},
        {"role": "developer", "content": "Be brief."},
    ]  # fmt: skip
    body = ResponsesBody.model_validate({"model": "m", "input": items})
    told = [(m.role, m.reasoning, m.text, len(m.calls)) for m in body.conversation()]
    assert told == [
        ("user", None, "Rain?", 0),
        ("assistant", "I look.", "", 1),
        ("tool", None, "Yes.", 0),
        ("assistant", "So.", "It rains.", 0),
        ("assistant", None, "Really.", 0),
        ("assistant", "", "", 0),
        ("system", None, "Be brief.", 0),
    ]


def test_reasoning_that_is_not_asked_for_is_in_no_chunk(tokenizer: Tokenizer) -> None:
    answer = "<think>Secret.</think>Sure."
    plan = plan_of(tokenizer, HERMES, is_returned=False)
    deltas = deltas_of(tokenizer, plan, answer, [2, 9, 20], FinishReason.STOP)
    whole = ChatFormat(order(), plan, tokenizer, streams_usage=False).whole([deltas], USAGE)
    assert msgspec.to_builtins(whole.choices[0].message) == {
        "role": "assistant",
        "content": "Sure.",
        "refusal": None,
    }
    form = ChatFormat(order(), plan, tokenizer, streams_usage=False)
    chunks = [chunk for delta in deltas for chunk in form.chunks(delta)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Sure."
    assert not any(chunk.choices[0].delta.reasoning_content for chunk in chunks)


def _reasoning(message: Any) -> str:
    """The same under both names."""
    extra = message.model_extra
    assert extra.get("reasoning_content") == extra.get("reasoning")
    return extra.get("reasoning") or ""


def _called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def _items(response: Any) -> list[Any]:
    """Without the ids of calls, which are drawn for each answer."""
    dumped = response.model_dump()["output"]
    for item in dumped:
        item.pop("call_id", None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    return list(dumped)
