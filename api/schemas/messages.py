"""The messages of a conversation, as `/v1/chat/completions` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator
from pydantic_core import from_json

from ..contract.request_model import RequestModel, invalid, unsupported
from ..tools.conversation import ChatMessage, PastCall
from .tools import MAX_TOOLS, FunctionName, ToolType

MAX_MESSAGES = 2048
MAX_PARTS = 1024
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

CallId = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class ContentPart(RequestModel):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None

    tolerated: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    @model_validator(mode="before")
    @classmethod
    def refuse_other_types(cls, part: object) -> object:
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise unsupported("type")
        return part


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


ContentParts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS)]


class CalledFunction(RequestModel):
    name: FunctionName
    arguments: str
    """A JSON object as a string."""

    @model_validator(mode="after")
    def check_arguments(self) -> Self:
        if parsed_arguments(self.arguments) is None:
            raise invalid("arguments", "is not a JSON object")
        return self


class Call(ToolType):
    """A call that the assistant made."""

    id: CallId
    function: CalledFunction

    tolerated: ClassVar[frozenset[str]] = ToolType.tolerated | {"index"}

    def as_past_call(self) -> PastCall:
        arguments = parsed_arguments(self.function.arguments)
        return PastCall(self.id, self.function.name, arguments or {})


class Message(RequestModel):
    role: str
    content: (
        Annotated[
            ContentParts,
            BeforeValidator(_as_parts, json_schema_input_type=str | ContentParts),
        ]
        | None
    ) = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS)] | None = None
    """Calls of an assistant message."""
    tool_call_id: CallId | None = None
    """In a `tool` message: the id of the call that it answers."""
    reasoning_content: str | None = None
    """The reasoning of an assistant message. The chat template decides whether the model sees
    it."""
    reasoning: str | None = None
    """The same, under its newer name."""

    tolerated: ClassVar[frozenset[str]] = frozenset({"name", "cache_control"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"annotations": ([],)}

    @model_validator(mode="after")
    def check_role(self) -> Self:
        if self.role not in ROLES:
            raise unsupported("role")
        if self.tool_calls and self.role != "assistant":
            raise invalid("tool_calls", "are only allowed in assistant messages")
        for field in ("reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise invalid(field, "is only allowed in assistant messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise invalid(
                "tool_call_id", "is required in `tool` messages and not allowed in others"
            )
        return self

    @property
    def text(self) -> str:
        return "\n".join(part.text or "" for part in self.content or [])


def as_conversation(messages: Sequence[Message]) -> list[ChatMessage]:
    """The messages as prompts are made of them; `developer` is what templates call `system`."""
    names = {call.id: call.function.name for m in messages for call in m.tool_calls or ()}
    return [
        ChatMessage(
            role="system" if message.role == "developer" else message.role,
            text=message.text,
            calls=tuple(call.as_past_call() for call in message.tool_calls or ()),
            call_id=message.tool_call_id,
            tool_name=names.get(message.tool_call_id or ""),
            reasoning=message.reasoning or message.reasoning_content,
        )
        for message in messages
    ]


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object. No text at all is none."""
    try:
        # As bodies are read: whole characters, a bounded depth, no NaN.
        arguments = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None
