"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from ..contract.request_model import invalid
from ..tools.conversation import ChatMessage
from ..tools.tool import ToolUse
from .chat_form import ChatFormBody
from .generation import GenerationBody, NumLogprobs, OutputTokens, ReasoningEffort
from .messages import MAX_MESSAGES, Message, as_conversation
from .tools import MAX_TOOLS, ChatTool, OptionalToolChoice, tool_use


class ChatBody(GenerationBody, ChatFormBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: OutputTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: OptionalToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Passed to the chat template; `none`: no reasoning. Default: as the template decides."""
    include_reasoning: bool | None = None
    """`false`: the reasoning is generated but not returned."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"model": "support-bot", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64},
        {
            "model": "acme/support-bot@prod",
            "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "parameters": {
                            "type": "object",
                            "properties": {"city": {"type": "string"}},
                        },
                    },
                }
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )

    tolerated: ClassVar[frozenset[str]] = GenerationBody.tolerated | {"prediction"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.neutral,
        "add_special_tokens": (False,),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "verbosity": ("medium",),
    }

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "requires `logprobs` to be true")
        return self

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        if self.tool_use is not None and self.structured_outputs is not None:
            raise invalid("structured_outputs", "cannot be combined with `tools`")
        return self

    @property
    def output_limit(self) -> int | None:
        """Default: as many tokens as fit into the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    effort_param: ClassVar[str] = "reasoning_effort"

    @property
    def effort(self) -> ReasoningEffort | None:
        """How much the model reasons; None: as the template decides."""
        return self.reasoning_effort

    @property
    def returns_reasoning(self) -> bool:
        return self.include_reasoning is not False

    def conversation(self) -> list[ChatMessage]:
        """The messages as prompts are made of them."""
        return as_conversation(self.messages)

    @property
    def tool_use(self) -> ToolUse | None:
        """None: the prompt contains no tools."""
        tools = [tool.as_tool() for tool in self.tools or ()]
        is_parallel = self.parallel_tool_calls is not False
        return tool_use(tools, self.tool_choice, is_parallel=is_parallel)
