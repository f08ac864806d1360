"""Chat completions through the unmodified openai client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from openai.types.chat import ChatCompletionMessageParam

from loraplex.engine.text.tokenizer import Tokenizer
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

GO_ON = {"ignore_eos": True}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]


def test_answers_whole(resident: Caller) -> None:
    answer = resident.openai.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=6, temperature=0, extra_body=GO_ON
    )
    assert answer.model == "resident/bot@1"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_a_stream_says_the_same_as_the_whole_answer(resident: Caller) -> None:
    client = resident.openai
    whole = client.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=12, seed=7, extra_body=GO_ON
    )
    stream = client.chat.completions.create(
        model="bot",
        messages=HELLO,
        max_tokens=12,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=GO_ON,
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12


def test_the_async_client_streams_many_choices_at_once(resident: Caller) -> None:
    async def ask(model: str) -> list[str]:
        texts = ["", ""]
        async with resident.openai_async as client:
            stream = await client.chat.completions.create(
                model=model, messages=HELLO, max_tokens=8, n=2, seed=3, stream=True
            )
            async for chunk in stream:
                choice = chunk.choices[0]
                texts[choice.index] += choice.delta.content or ""
        return texts

    async def ask_all() -> list[list[str]]:
        return await asyncio.gather(*(ask(model) for model in ["bot", "tiny"] * 4))

    answers = asyncio.run(ask_all())
    assert all(answer == answers[0] for answer in answers[::2])
    assert all(answer == answers[1] for answer in answers[1::2])
    assert answers[0] != answers[1]


def test_choices_differ_and_the_first_is_that_of_n_1(resident: Caller) -> None:
    client = resident.openai
    several = client.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=12, n=3, seed=11, extra_body=GO_ON
    )
    alone = client.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=12, seed=11, extra_body=GO_ON
    )
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone.choices[0].message.content
    assert len(set(texts)) == 3
    assert several.usage is not None
    assert alone.usage is not None
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    assert several.usage.completion_tokens == 36


def test_logprobs_spell_the_answer(resident: Caller) -> None:
    answer = resident.openai.chat.completions.create(
        model="bot",
        messages=HELLO,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body=GO_ON,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    spelled = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert spelled.decode(errors="replace") == answer.choices[0].message.content
    for entry in logprobs.content:
        top = [candidate.logprob for candidate in entry.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert entry.logprob == top[0]  # greedy


def test_a_stop_string_ends_the_answer_and_is_not_in_it(resident: Caller) -> None:
    client = resident.openai
    free = client.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=24, temperature=0, extra_body=GO_ON
    )
    text = free.choices[0].message.content or ""
    stop = text[4:6]
    stopped = client.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=24, temperature=0, stop=[stop], extra_body=GO_ON
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text[: text.index(stop)]


def test_message_forms_that_mean_the_same_give_the_same(resident: Caller) -> None:
    client = resident.openai
    forms: list[list[ChatCompletionMessageParam]] = [
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a\nb"}],
        [
            {"role": "developer", "content": "Be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
    ]
    answers = {
        client.chat.completions.create(
            model="bot",
            messages=messages,
            max_completion_tokens=10,
            temperature=0,
            store=False,
            user="someone",
            metadata={"a": "b"},
            tools=[],
        )
        .choices[0]
        .message.content
        for messages in forms
    }
    assert len(answers) == 1


def test_without_a_limit_the_answer_may_fill_the_context(resident: Caller) -> None:
    answer = resident.openai.chat.completions.create(
        model="bot", messages=HELLO, temperature=0, extra_body=GO_ON
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


def test_headers_say_which_version_answered(resident: Caller, server: ServerUnderTest) -> None:
    raw = resident.openai.chat.completions.with_raw_response.create(
        model="bot@prod", messages=HELLO, max_tokens=2
    )
    headers = raw.headers
    assert headers["x-loraplex-adapter"] == "resident/bot@1"
    assert headers["x-loraplex-digest"].startswith("sha256:")
    assert headers["x-loraplex-tier"] in {"device", "host", "disk", "store"}
    assert int(headers["x-loraplex-wait-ms"]) >= 0
    assert int(headers["openai-processing-ms"]) >= 0
    usage = server.usage_of(headers["x-request-id"], resident)
    assert usage is not None
    assert usage.adapter_digest == headers["x-loraplex-digest"]


def test_usage_is_committed_before_done_is_sent(resident: Caller, server: ServerUnderTest) -> None:
    body = {"model": "bot", "messages": HELLO, "max_tokens": 4, "stream": True, **GO_ON}
    with resident.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["finish_reason"]:
                break
        usage = server.usage_of(answer.headers["x-request-id"], resident)
    assert usage is not None
    assert usage.completion_tokens == 4
    assert usage.finish_reason == "length"


def test_the_text_is_what_the_tokenizer_makes_of_the_tokens(
    resident: Caller, tiny_base: Path
) -> None:
    tokenizer = Tokenizer(tiny_base)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hello there"}])
    chat = resident.openai.chat.completions.create(
        model="bot", messages=HELLO, max_tokens=9, temperature=0
    )
    plain = resident.openai.completions.create(
        model="bot", prompt=prompt, max_tokens=9, temperature=0
    )
    assert chat.choices[0].message.content == plain.choices[0].text


def test_a_closed_stream_ends_the_generation(resident: Caller, server: ServerUnderTest) -> None:
    stream = resident.openai.chat.completions.create(
        model="bot",
        messages=HELLO,
        max_tokens=480,
        stream=True,
        extra_body=GO_ON,
    )
    request_id = stream.response.headers["x-request-id"]
    next(iter(stream))
    stream.close()
    usage = wait_for(lambda: server.usage_of(request_id, resident))
    assert usage is not None
    assert usage.finish_reason == "aborted"
    assert usage.completion_tokens < 480
