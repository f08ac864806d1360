"""Reasoning of `/v1/messages` through the unmodified anthropic client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.server import Caller
from support.thinking import CLOSING

anthropic = pytest.importorskip("anthropic", reason="asks through the official client")

HELLO: Any = [{"role": "user", "content": "Is it?"}]
ASK: dict[str, Any] = {"model": "thinking", "messages": HELLO, "max_tokens": 200}
SOON: dict[str, Any] = {"seed": 1, "logit_bias": {str(CLOSING): 5}}
ADAPTIVE: Any = {"type": "adaptive"}
DISABLED: Any = {"type": "disabled"}


@pytest.fixture
def client(thinking_caller: Caller) -> Iterator[Any]:
    url, key = thinking_caller.url, thinking_caller.key
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as made:
        yield made


def test_reasoning_is_a_block_before_the_text_as_in_a_chat(
    client: Any, thinking_caller: Caller
) -> None:
    message = client.messages.create(**ASK, thinking=ADAPTIVE, extra_body=SOON)
    thinking, text = message.content
    assert (thinking.type, thinking.signature, text.type) == ("thinking", "", "text")
    chat: Any = thinking_caller.openai.chat.completions.create(**ASK, extra_body=SOON)
    answer = chat.choices[0].message
    assert (thinking.thinking, text.text) == (answer.reasoning_content, answer.content)


def test_a_stream_has_the_same_blocks(client: Any) -> None:
    asked = {**ASK, "thinking": ADAPTIVE, "extra_body": SOON}
    whole = client.messages.create(**asked)
    raw = list(client.messages.create(**asked, stream=True))
    starts = [event for event in raw if event.type == "content_block_start"]
    assert [event.content_block.type for event in starts] == ["thinking", "text"]
    deltas = [event.delta for event in raw if event.type == "content_block_delta"]
    thoughts = "".join(each.thinking for each in deltas if each.type == "thinking_delta")
    texts = "".join(each.text for each in deltas if each.type == "text_delta")
    assert [thoughts, texts] == [whole.content[0].thinking, whole.content[1].text]


def test_reasoning_is_returned_only_if_it_is_asked_for(client: Any) -> None:
    shown = client.messages.create(**ASK, thinking=ADAPTIVE, extra_body=SOON)
    hidden = client.messages.create(**ASK, extra_body=SOON)
    assert hidden.content == shown.content[1:]
    assert hidden.usage == shown.usage


def test_reasoning_can_be_turned_off_and_its_prompt_is_counted(client: Any) -> None:
    message = client.messages.create(**{**ASK, "max_tokens": 8}, thinking=DISABLED)
    assert [block.type for block in message.content] == ["text"]
    asked: dict[str, Any] = {"model": "thinking", "messages": HELLO}
    off = client.messages.count_tokens(**asked, thinking=DISABLED).input_tokens
    on = client.messages.count_tokens(**asked, thinking=ADAPTIVE).input_tokens
    usage = message.usage
    assert on < off == usage.input_tokens + usage.cache_read_input_tokens


def test_a_budget_is_refused(client: Any) -> None:
    budget: Any = {"type": "enabled", "budget_tokens": 1024}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASK, thinking=budget)
    assert caught.value.body["error"]["code"] == "unsupported_parameter"
