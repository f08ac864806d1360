"""Agents of Pydantic AI."""

from __future__ import annotations

import asyncio

from asked import MAX_TOKENS, MODEL, Choice, report, server
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, PROMPT = server()
provider = OpenAIProvider(base_url=URL, api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider)
settings = {"temperature": 0, "max_tokens": MAX_TOKENS}


async def stream() -> str:
    async with Agent(model, model_settings=settings).run_stream(PROMPT) as result:
        return await result.get_output()


def ask(used: OpenAIChatModel | OpenAIResponsesModel, output: object = str) -> object:
    return Agent(used, model_settings=settings, output_type=output).run_sync(PROMPT).output


report(
    "pydantic-ai-slim",
    chat=ask(model),
    stream=asyncio.run(stream()),
    responses=ask(OpenAIResponsesModel(MODEL, provider=provider)),
    schema=ask(model, NativeOutput(Choice)).model_dump(),
    tools=ask(model, ToolOutput(Choice)).model_dump(),
)
