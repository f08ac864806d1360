"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ...engine.grammars.spec import GrammarSpec
from ...engine.text.chat_form import ChatForm
from ..contract.request_model import RequestModel, invalid, unsupported
from ..tools.conversation import ChatMessage
from ..tools.reasoning_effort import NO_EFFORT, OWN_EFFORT
from ..tools.tool import ToolUse
from .anthropic_blocks import (
    InputMessage,
    InputTool,
    InputToolChoice,
    TextContent,
    as_conversation,
    text_of,
)
from .generation import ModelName, OutputTokens, SamplingBody, StopStrings
from .messages import MAX_MESSAGES
from .output_format import schema_grammar
from .tools import MAX_TOOLS, tool_use


class SchemaFormat(RequestModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    format: SchemaFormat | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"effort": ("high",)}


class Thinking(RequestModel):
    """Whether the model reasons. A budget for it (`enabled`) is not supported."""

    type: Literal["adaptive", "disabled"]

    @model_validator(mode="before")
    @classmethod
    def refuse_budgets(cls, thinking: object) -> object:
        if isinstance(thinking, dict) and thinking.get("type") == "enabled":
            raise unsupported("type")
        return thinking


class MessagesPromptBody(RequestModel):
    """What makes the prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The answer continues the last message if it is the assistant's."""
    system: TextContent | None = None
    """A system message before the others."""
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: InputToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    """Default: as the template decides, and the reasoning is not returned."""

    tolerated: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "speed": ("standard",),
    }

    @model_validator(mode="after")
    def check_prompt(self) -> Self:
        _ = self.tool_use  # refuses a choice that does not fit the tools
        last = self.conversation()[-1]
        if last.role == "assistant" and last.calls:
            raise invalid("messages", "end with a `tool_use` block without a `tool_result`")
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """None: the prompt contains no tools."""
        asked = self.tool_choice
        return tool_use(
            [tool.as_tool() for tool in self.tools or ()],
            asked.as_choice() if asked else None,
            is_parallel=not (asked and asked.disable_parallel_tool_use),
        )

    effort_param: ClassVar[str] = "thinking"

    @property
    def effort(self) -> str | None:
        """How much the model reasons; None: as the template decides."""
        if self.thinking is None:
            return None
        return NO_EFFORT if self.thinking.type == "disabled" else OWN_EFFORT

    @property
    def returns_reasoning(self) -> bool:
        return self.thinking is not None

    @property
    def chat_form(self) -> ChatForm:
        """How the messages are rendered."""
        continues = self.messages[-1].role == "assistant"
        return ChatForm(adds_generation_prompt=not continues, continues_final_message=continues)

    def conversation(self) -> list[ChatMessage]:
        """The messages that prompts are made of."""
        start = [] if self.system is None else [ChatMessage("system", text_of(self.system))]
        return [*start, *as_conversation(self.messages)]


class MessagesBody(SamplingBody, MessagesPromptBody):
    max_tokens: OutputTokens
    stop_sequences: StopStrings | None = None

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "model": "support-bot",
            "max_tokens": 64,
            "messages": [{"role": "user", "content": "Hi"}],
        },
        {
            "model": "acme/support-bot@prod",
            "max_tokens": 64,
            "system": "Be brief.",
            "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
            "tools": [
                {
                    "name": "weather",
                    "input_schema": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                    },
                }
            ],
            "stream": True,
        },
    )

    store: ClassVar[bool | None] = None
    tolerated: ClassVar[frozenset[str]] = SamplingBody.tolerated | MessagesPromptBody.tolerated
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingBody.neutral,
        **MessagesPromptBody.neutral,
    }

    @model_validator(mode="after")
    def check_forms(self) -> Self:
        if self.stop and self.stop_sequences:
            raise invalid("stop", "cannot be combined with `stop_sequences`")
        others = {"tools": self.tool_use, "output_config": self.answer_schema}
        for name, other in others.items():
            if self.structured_outputs is not None and other is not None:
                raise invalid("structured_outputs", f"cannot be combined with `{name}`")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or self.stop or ())

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def output_limit(self) -> int:
        return self.max_tokens

    @property
    def num_logprobs(self) -> None:
        """Anthropic's form has none."""
        return None

    @property
    def form_grammar(self) -> GrammarSpec | None:
        """What the text of the answer has to follow. Raises InvalidGrammar if it is too long."""
        if self.structured_outputs is not None:
            return self.structured_outputs.spec
        return None if self.answer_schema is None else schema_grammar(self.answer_schema)

    @property
    def form_param(self) -> str:
        """The field that says what the text has to follow."""
        return "structured_outputs" if self.structured_outputs else "output_config"

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The schema that the text follows, if it is JSON."""
        config = self.output_config
        return config.format.json_schema if config and config.format else None


class CountTokensBody(MessagesPromptBody):
    model: ModelName

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"model": "support-bot", "messages": [{"role": "user", "content": "Hi"}]},
    )
