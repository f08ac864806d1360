"""Instructor: objects of a pydantic model."""

from __future__ import annotations

import asyncio

import instructor
from asked import MAX_TOKENS, MODEL, Choice, report, server
from openai import AsyncOpenAI, OpenAI

URL, KEY, PROMPT = server()
settings = {
    "model": MODEL,
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "response_model": Choice,
    "messages": [{"role": "user", "content": PROMPT}],
}


def ask(mode: instructor.Mode, **more: bool) -> dict[str, str]:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=mode)
    return client.chat.completions.create(**settings, **more).model_dump()


async def ask_asynchronously() -> dict[str, str]:
    client = instructor.from_openai(
        AsyncOpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA
    )
    return (await client.chat.completions.create(**settings)).model_dump()


report(
    "instructor",
    schema=ask(instructor.Mode.JSON_SCHEMA),
    tools=ask(instructor.Mode.TOOLS, parallel_tool_calls=False),
    asynchronous=asyncio.run(ask_asynchronously()),
)
