"""The body of `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from ...engine.grammars.spec import GrammarSpec
from ...engine.text.chat_form import ChatForm
from ..contract.request_model import RequestModel, invalid, unsupported
from ..tools.conversation import ChatMessage, PastCall
from ..tools.tool import ToolUse
from .generation import NumLogprobs, OutputTokens, ReasoningEffort, SamplingBody
from .messages import MAX_MESSAGES, MAX_PARTS, CallId, parsed_arguments
from .output_format import OutputFormat, SchemaName
from .tools import MAX_TOOLS, FunctionName, OptionalToolChoice, ResponsesTool, tool_use

LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = frozenset({"input_text", "output_text"})
ROLES = frozenset({"system", "developer", "user", "assistant"})
KINDS = frozenset({"message", "function_call", "function_call_output", "reasoning"})


class TextPart(RequestModel):
    """A part of an item; only text is supported."""

    type: str
    text: str | None = None

    tolerated: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"}
    )

    @model_validator(mode="after")
    def refuse_other_types(self) -> Self:
        if self.type not in TEXT_PARTS:
            raise unsupported("type")
        return self


def _as_parts(content: object) -> object:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


_Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
Content = Annotated[_Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts)]


def _text(parts: Sequence[TextPart]) -> str:
    return "\n".join(part.text or "" for part in parts)


class Item(RequestModel):
    """An item of a conversation; `id` and `status` are those of an earlier response."""

    tolerated: ClassVar[frozenset[str]] = frozenset({"id", "phase", "status"})


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: str
    content: Content

    @model_validator(mode="after")
    def refuse_other_roles(self) -> Self:
        if self.role not in ROLES:
            raise unsupported("role")
        return self


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    """A JSON object as a string."""

    @model_validator(mode="after")
    def check_arguments(self) -> Self:
        if parsed_arguments(self.arguments) is None:
            raise invalid("arguments", "is not a JSON object")
        return self

    def as_past_call(self) -> PastCall:
        return PastCall(self.call_id, self.name, parsed_arguments(self.arguments) or {})


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class ReasoningPart(RequestModel):
    """A part of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """The reasoning of an earlier response. The chat template decides whether the model sees it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None

    tolerated: ClassVar[frozenset[str]] = Item.tolerated | {"summary"}

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or ())


class OtherItem(RequestModel):
    """Any other item; refused."""

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, item: object) -> object:
        if isinstance(item, dict):
            raise unsupported("type")
        raise ValueError("is not an object")


def _kind_of_item(item: object) -> str:
    """In brackets: it is no part of where a field is."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return f"[{kind if kind in KINDS else 'other'}]"


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[OtherItem, Tag("[other]")],
    Discriminator(_kind_of_item),
]


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


ResponseId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]


class TextFormat(OutputFormat):
    """As in `/v1/responses`: flat."""

    name: SchemaName | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.json_schema is None):
            raise invalid("schema", "json_schema requires `name` and `schema`")
        if self.type != "json_schema" and self.json_schema is not None:
            raise invalid("schema", "is only allowed for `type` json_schema")
        return self

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        return super().answer_schema if self.json_schema is None else self.json_schema


class TextOptions(RequestModel):
    format: TextFormat | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"verbosity": ("medium",)}


class ReasoningOptions(RequestModel):
    effort: ReasoningEffort | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        # Reasoning is returned as it is: no summary is the server's choice.
        "generate_summary": ("auto",),
        "summary": ("auto",),
    }


class ResponsesBody(SamplingBody):
    chat_form: ClassVar[ChatForm] = ChatForm()

    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: OutputTokens | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: OptionalToolChoice = None
    parallel_tool_calls: bool | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    """Store the response, so that later requests can continue it. Default: false."""
    previous_response_id: ResponseId | None = None
    """A stored response to continue: its conversation is put before the input."""
    metadata: dict[str, str] | None = None
    """Returned unchanged."""
    user: str | None = None
    """Returned unchanged."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"model": "support-bot", "input": "Hi", "max_output_tokens": 64},
        {"model": "support-bot", "input": [{"role": "user", "content": "Hi"}], "stream": True},
    )

    tolerated: ClassVar[frozenset[str]] = SamplingBody.tolerated - {"metadata", "user"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingBody.neutral,
        "background": (False,),
        "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "truncation": ("disabled",),
    }

    @model_validator(mode="after")
    def check_included(self) -> Self:
        if set(self.include or ()) - {LOGPROBS, "reasoning.encrypted_content"}:
            raise unsupported("include")
        return self

    @model_validator(mode="after")
    def check_forms(self) -> Self:
        others = {"tools": self.tool_use, "text.format": self.text and self.text.format}
        for name, other in others.items():
            if self.structured_outputs is not None and other is not None:
                raise invalid("structured_outputs", f"cannot be combined with `{name}`")
        return self

    effort_param: ClassVar[str] = "reasoning.effort"
    returns_reasoning: ClassVar[bool] = True

    @property
    def effort(self) -> ReasoningEffort | None:
        """How much the model reasons; None: as the template decides."""
        return self.reasoning.effort if self.reasoning else None

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def output_limit(self) -> int | None:
        """Default: as many tokens as fit into the context."""
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def tool_use(self) -> ToolUse | None:
        """None: the prompt contains no tools."""
        tools = [tool.as_tool() for tool in self.tools or ()]
        is_parallel = self.parallel_tool_calls is not False
        return tool_use(tools, self.tool_choice, is_parallel=is_parallel)

    @property
    def form_grammar(self) -> GrammarSpec | None:
        """What the text of the answer has to follow. Raises InvalidGrammar if it is too long."""
        if self.structured_outputs is not None:
            return self.structured_outputs.spec
        return self.text.format.grammar if self.text and self.text.format else None

    @property
    def form_param(self) -> str:
        """The field that says what the text has to follow."""
        return "structured_outputs" if self.structured_outputs else "text.format"

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The schema that the text follows, if it is JSON."""
        return self.text.format.answer_schema if self.text and self.text.format else None

    def conversation(self) -> list[ChatMessage]:
        """The messages that prompts are made of; `developer` is what templates call `system`."""
        start = [] if self.instructions is None else [ChatMessage("system", self.instructions)]
        return [*start, *_messages(self.input)]


def _messages(items: Sequence[InputItem]) -> Iterator[ChatMessage]:
    names = {item.call_id: item.name for item in items if isinstance(item, FunctionCallItem)}
    last: ChatMessage | None = None
    for item in items:
        extended = None if last is None else _extended(last, item)
        if extended is None and last is not None:
            yield last
        last = extended or _begun(item, names)
    if last is not None:
        yield last


def _extended(last: ChatMessage, item: InputItem) -> ChatMessage | None:
    """The message with an item that belongs to it: calls belong to the assistant's message before
    them, and text to the reasoning before it."""
    if last.role != "assistant":
        return None
    match item:
        case FunctionCallItem():
            return replace(last, calls=(*last.calls, item.as_past_call()))
        case MessageItem(role="assistant") if last.reasoning is not None and not (
            last.text or last.calls
        ):
            return replace(last, text=_text(item.content))
        case _:
            return None


def _begun(item: InputItem, names: Mapping[str, str]) -> ChatMessage:
    match item:
        case ReasoningItem():
            return ChatMessage("assistant", "", reasoning=item.text)
        case FunctionCallItem():
            return ChatMessage("assistant", "", (item.as_past_call(),))
        case FunctionCallOutputItem():
            text, name = _text(item.output), names.get(item.call_id)
            return ChatMessage("tool", text, call_id=item.call_id, tool_name=name)
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            return ChatMessage(role, _text(item.content))
        case OtherItem():
            raise AssertionError("it was refused")
