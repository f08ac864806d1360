"""LiteLLM, as a library."""

from __future__ import annotations

import asyncio
import json

import litellm
from asked import MAX_TOKENS, MODEL, Choice, report, server

URL, KEY, PROMPT = server()
settings = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": KEY,
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": Choice.model_json_schema()}}


async def ask() -> str:
    answer = await litellm.acompletion(**settings)
    return answer.choices[0].message.content


chunks = litellm.completion(stream=True, **settings)
called = litellm.completion(tools=[TOOL], tool_choice="required", **settings)
embedded = litellm.embedding(
    model=f"openai/{MODEL}", input=[PROMPT], api_base=URL, api_key=KEY, encoding_format="float"
)
report(
    "litellm",
    chat=litellm.completion(**settings).choices[0].message.content,
    stream="".join(chunk.choices[0].delta.content or "" for chunk in chunks),
    asynchronous=asyncio.run(ask()),
    schema=json.loads(
        litellm.completion(response_format=Choice, **settings).choices[0].message.content
    ),
    tools=json.loads(called.choices[0].message.tool_calls[0].function.arguments),
    embeddings=embedded.data[0]["embedding"],
)
