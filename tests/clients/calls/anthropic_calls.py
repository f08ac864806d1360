"""Anthropic's official client, through `/v1/messages`."""

from __future__ import annotations

import asyncio

from anthropic import Anthropic, AsyncAnthropic
from asked import MAX_TOKENS, MODEL, Choice, report, server

URL, KEY, PROMPT = server()
HOST = URL.removesuffix("/v1")
MESSAGES = [{"role": "user", "content": PROMPT}]
SETTINGS = {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
TOOL = {"name": "choose", "input_schema": Choice.model_json_schema()}
client = Anthropic(base_url=HOST, api_key=KEY)


async def ask() -> str:
    async with AsyncAnthropic(base_url=HOST, api_key=KEY) as other:
        answer = await other.messages.create(messages=MESSAGES, **SETTINGS)
    return answer.content[0].text


def stream() -> str:
    with client.messages.stream(messages=MESSAGES, **SETTINGS) as events:
        return events.get_final_text()


called = client.messages.create(
    messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"}, **SETTINGS
)
report(
    "anthropic",
    chat=client.messages.create(messages=MESSAGES, **SETTINGS).content[0].text,
    stream=stream(),
    asynchronous=asyncio.run(ask()),
    tools=called.content[0].input,
)
