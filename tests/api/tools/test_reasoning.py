"""Reasoning through the unmodified openai client: chats and responses, complete and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from support.command import Command
from support.envelopes import check_envelope
from support.server import Caller
from support.thinking import CLOSING

HELLO: Any = [{"role": "user", "content": "Is it?"}]
ASK: dict[str, Any] = {"model": "thinking", "messages": HELLO, "max_tokens": 200, "seed": 1}
SOON: dict[str, Any] = {"logit_bias": {str(CLOSING): 5}}
"""The reasoning ends after some tokens."""


def reasoning_of(message: Any) -> str:
    assert message.model_extra.get("reasoning_content") == message.model_extra.get("reasoning")
    return str(message.model_extra.get("reasoning_content", ""))


def test_reasoning_that_does_not_end_is_all_there_is(thinking_caller: Caller) -> None:
    client = thinking_caller.openai
    ask: dict[str, Any] = {**ASK, "max_tokens": 20, "logit_bias": {str(CLOSING): -100}}
    answer = client.chat.completions.create(**ask)
    message = answer.choices[0].message
    assert message.content is None
    assert reasoning_of(message)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 20


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_answer_follows_its_form_and_the_reasoning_is_free(
    thinking_caller: Caller, is_streamed: bool
) -> None:
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    form: Any = {"structured_outputs": {"choice": ["yes", "no"]}}
    create = thinking_caller.openai.chat.completions.create
    if not is_streamed:
        answer = create(**ASK, **SOON, n=6, extra_body=form)
        usage, told = (
            answer.usage,
            [(reasoning_of(choice.message), choice.message.content) for choice in answer.choices],
        )
    else:
        texts = [["", ""] for _ in range(6)]
        options: Any = {"include_usage": True}
        for chunk in create(
            **ASK, **SOON, n=6, extra_body=form, stream=True, stream_options=options
        ):
            for choice in chunk.choices:
                texts[choice.index][0] += reasoning_of(choice.delta)
                texts[choice.index][1] += choice.delta.content or ""
            usage = chunk.usage
        told = [(reasoning, text) for reasoning, text in texts]
    assert any(reasoning for reasoning, _ in told), "a choice has reasoned"
    assert {content for _, content in told if content} <= {"yes", "no"}
    assert any(content for _, content in told), "a choice has answered"
    assert usage is not None
    assert usage.completion_tokens_details is not None
    reasoned = usage.completion_tokens_details.reasoning_tokens
    assert reasoned is not None
    assert 0 < reasoned < usage.completion_tokens


def test_without_effort_there_is_no_reasoning(thinking_caller: Caller) -> None:
    create = thinking_caller.openai.chat.completions.create
    answer = create(**{**ASK, "max_tokens": 8}, reasoning_effort="none")
    asked: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    again = create(**{**ASK, "max_tokens": 8}, extra_body=asked)
    assert answer.choices[0].message.content
    assert again.choices[0].message == answer.choices[0].message
    assert reasoning_of(answer.choices[0].message) == ""
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    thinking = create(**{**ASK, "max_tokens": 8}, reasoning_effort="high")
    assert thinking.usage is not None
    assert thinking.usage.prompt_tokens < answer.usage.prompt_tokens


def test_reasoning_may_be_left_out(thinking_caller: Caller) -> None:
    create = thinking_caller.openai.chat.completions.create
    ask: dict[str, Any] = {**ASK, "max_tokens": 20}
    hidden = create(**ask, extra_body={"include_reasoning": False})
    shown = create(**ask)
    assert reasoning_of(hidden.choices[0].message) == ""
    assert (hidden.choices[0].message.content or "") == (shown.choices[0].message.content or "")
    assert hidden.usage == shown.usage


def test_responses_show_reasoning_as_an_item(thinking_caller: Caller) -> None:
    client = thinking_caller.openai
    ask: dict[str, Any] = {
        "model": "thinking",
        "input": "Is it?",
        "max_output_tokens": 20,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "extra_body": {"seed": 1, "logit_bias": {str(CLOSING): -100}},
    }
    whole = client.responses.create(**ask)
    (item,) = whole.output
    assert item.type == "reasoning"
    assert item.content is not None
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 20
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    assert "response.reasoning_text.delta" in {event.type for event in events}
    final: Any = events[-1]
    assert final.type == "response.incomplete"
    assert [part.text for part in final.response.output[0].content] == [item.content[0].text]
    turn: Any = [{"role": "user", "content": "Is it?"}, item.model_dump(exclude_none=True)]
    more: Any = [*turn, {"role": "user", "content": "And?"}]
    again = client.responses.create(**{**ask, "input": more})
    assert again.usage is not None
    assert again.usage.input_tokens > whole.usage.input_tokens + len(item.content[0].text)


def test_an_effort_that_there_is_not_is_refused(thinking_caller: Caller) -> None:
    answer = thinking_caller.http.post(
        "/v1/chat/completions", json={**ASK, "reasoning_effort": "colossal"}
    )
    check_envelope(answer, "invalid_parameter", "reasoning_effort")


def test_the_terminal_shows_reasoning_apart_from_the_answer(
    thinking_caller: Caller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create = thinking_caller.openai.chat.completions.create
    asks: Any = ({**ASK, "seed": seed, "temperature": 2} for seed in range(50))
    told = ((ask["seed"], create(**ask).choices[0].message) for ask in asks)
    seed, message = next(
        (seed, message) for seed, message in told if message.content and reasoning_of(message)
    )
    options = ("--max-tokens", "200", "--seed", str(seed), "--temperature", "2")
    chat = Command(monkeypatch, capsys, thinking_caller, "chat")
    code, out, err = chat("thinking", "Is it?", *options)
    assert code == 0
    assert printable(out) == printable(message.content + "\n")
    assert printable(err) == printable(reasoning_of(message) + "\n")
    code, out, err = chat("thinking", "Is it?", "--max-tokens", "1", "--seed", str(seed))
    assert (code, out) == (0, "\n")
    assert err.endswith("\n")


def printable(text: str) -> str:
    """Without the characters that a terminal would obey."""
    return "".join(c for c in text if c in "\n\t" or (c.isprintable() and c != "\ufffd"))
