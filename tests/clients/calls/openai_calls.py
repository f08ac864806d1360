"""The official client."""

from __future__ import annotations

import asyncio

from asked import MAX_TOKENS, MODEL, Choice, report, server
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool

URL, KEY, PROMPT = server()
MESSAGES = [{"role": "user", "content": PROMPT}]
client = OpenAI(base_url=URL, api_key=KEY)
create = client.chat.completions.create
settings = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}


async def ask() -> str:
    async with AsyncOpenAI(base_url=URL, api_key=KEY) as other:
        answer = await other.chat.completions.create(messages=MESSAGES, **settings)
    return answer.choices[0].message.content


def stream() -> str:
    with client.chat.completions.stream(messages=MESSAGES, **settings) as events:
        return events.get_final_completion().choices[0].message.content


parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Choice, **settings)
called = client.chat.completions.parse(
    messages=MESSAGES, tools=[pydantic_function_tool(Choice)], tool_choice="required", **settings
)
responded = client.responses.create(
    model=MODEL, input=PROMPT, max_output_tokens=MAX_TOKENS, temperature=0
)
report(
    "openai",
    chat=create(messages=MESSAGES, **settings).choices[0].message.content,
    stream=stream(),
    asynchronous=asyncio.run(ask()),
    responses=responded.output_text,
    schema=parsed.choices[0].message.parsed.model_dump(),
    tools=called.choices[0].message.tool_calls[0].function.parsed_arguments.model_dump(),
    embeddings=client.embeddings.create(model=MODEL, input=[PROMPT]).data[0].embedding,
)
