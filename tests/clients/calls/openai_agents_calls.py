"""OpenAI's agents, through chat completions and through responses."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import MAX_TOKENS, MODEL, Choice, report, server
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

URL, KEY, PROMPT = server()
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL, api_key=KEY)
model = OpenAIChatCompletionsModel(MODEL, client)
responses = OpenAIResponsesModel(MODEL, client)
settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
required = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, tool_choice="required")
called = []


@function_tool
def choose(choice: Choice) -> str:
    """Choose a table."""
    called.append(choice.model_dump())
    return "chosen"


async def stream() -> str:
    run = Runner.run_streamed(Agent("a", model=model, model_settings=settings), PROMPT)
    events = [event async for event in run.stream_events() if event.type == "raw_response_event"]
    return "".join(
        event.data.delta for event in events if isinstance(event.data, ResponseTextDeltaEvent)
    )


async def main() -> None:
    plain = Agent("a", model=model, model_settings=settings)
    other = Agent("a", model=responses, model_settings=settings)
    typed = Agent("a", model=model, model_settings=settings, output_type=Choice)
    tools = Agent(
        "a",
        model=model,
        model_settings=required,
        tools=[choose],
        tool_use_behavior="stop_on_first_tool",
    )
    await Runner.run(tools, PROMPT)
    report(
        "openai-agents",
        chat=(await Runner.run(plain, PROMPT)).final_output,
        stream=await stream(),
        responses=(await Runner.run(other, PROMPT)).final_output,
        schema=(await Runner.run(typed, PROMPT)).final_output.model_dump(),
        tools=called[0],
    )


asyncio.run(main())
