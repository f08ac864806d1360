"""Messages, content blocks and tools as `/v1/messages` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from ..contract.request_model import RequestModel, invalid, unsupported
from ..tools.conversation import ChatMessage, PastCall
from ..tools.tool import Tool
from .messages import MAX_PARTS, CallId
from .tools import ToolChoice

BLOCKS_OF_ROLES: Mapping[str, frozenset[str]] = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "tool_use"}),
}
ERROR_RESULT = "Error: "
"""Begins the text of a tool result with `is_error`: chat templates have no field for it."""

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class Block(RequestModel):
    """A content block. `cache_control` has no effect: prefixes are always cached."""

    tolerated: ClassVar[frozenset[str]] = frozenset({"cache_control"})


class TextBlock(Block):
    type: Literal["text"]
    text: str

    tolerated: ClassVar[frozenset[str]] = Block.tolerated | {"citations"}


class ThinkingBlock(Block):
    """The reasoning of an assistant message. The chat template decides whether the model sees
    it."""

    type: Literal["thinking"]
    thinking: str

    tolerated: ClassVar[frozenset[str]] = Block.tolerated | {"signature"}


class ToolUseBlock(Block):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]

    tolerated: ClassVar[frozenset[str]] = Block.tolerated | {"caller"}

    def as_past_call(self) -> PastCall:
        return PastCall(self.id, self.name, self.input)


class OtherBlock(RequestModel):
    """Any other block; refused."""

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, block: object) -> object:
        if isinstance(block, dict):
            raise unsupported("type")
        raise ValueError("is not an object")


def _kind_of_block(block: object) -> str:
    """In brackets: it is no part of where a field is."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    known = kind in ("text", "thinking", "tool_use", "tool_result")
    return f"[{kind}]" if known else "[other]"


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


AnyText = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[OtherBlock, Tag("[thinking]")]
    | Annotated[OtherBlock, Tag("[tool_use]")]
    | Annotated[OtherBlock, Tag("[tool_result]")]
    | Annotated[OtherBlock, Tag("[other]")],
    Discriminator(_kind_of_block),
]
_Texts = Annotated[list[AnyText], Field(max_length=MAX_PARTS)]
TextContent = Annotated[_Texts, BeforeValidator(_as_blocks, json_schema_input_type=str | _Texts)]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextContent | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        return (ERROR_RESULT if self.is_error else "") + text_of(self.content or ())


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[OtherBlock, Tag("[other]")],
    Discriminator(_kind_of_block),
]
_Blocks = Annotated[list[AnyBlock], Field(max_length=MAX_PARTS)]
Content = Annotated[_Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)]


class InputMessage(RequestModel):
    """A message of the conversation."""

    role: str
    content: Content

    @model_validator(mode="after")
    def check_role(self) -> Self:
        allowed = BLOCKS_OF_ROLES.get(self.role)
        if allowed is None:
            raise unsupported("role")
        for block in self.content:
            kind = getattr(block, "type")  # noqa: B009  # `OtherBlock` is never an instance
            if kind not in allowed:
                raise invalid("content", f"has a `{kind}` block, which no {self.role} message has")
        return self


class InputTool(RequestModel):
    """A function that is offered to the model."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input."""
    strict: bool | None = None

    tolerated: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    @model_validator(mode="before")
    @classmethod
    def refuse_other_types(cls, tool: object) -> object:
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            raise unsupported("type")
        return tool

    def as_tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema, is_strict=bool(self.strict))


class InputToolChoice(RequestModel):
    """`auto`, `any`, `none`, or `tool` with a name."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise invalid("name", "is required for `type` tool and not allowed for others")
        return self

    def as_choice(self) -> ToolChoice:
        match self.type:
            case "any":
                return ToolChoice(type="required")
            case "tool":
                return ToolChoice(type="function", name=self.name)
            case kind:
                return ToolChoice(type=kind)


def text_of(blocks: Sequence[object]) -> str:
    """The text blocks among them, one a line."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def as_conversation(messages: Sequence[InputMessage]) -> Iterator[ChatMessage]:
    """The messages as prompts are made of them. Consecutive messages of one role are one."""
    turns = [
        (role, list(chain.from_iterable(message.content for message in group)))
        for role, group in groupby(messages, key=lambda message: message.role)
    ]
    names = {
        block.id: block.name
        for _, blocks in turns
        for block in blocks
        if isinstance(block, ToolUseBlock)
    }
    for role, blocks in turns:
        match role:
            case "assistant":
                yield _assistant_message(blocks)
            case "system":
                yield ChatMessage("system", text_of(blocks))
            case _:
                yield from _user_messages(blocks, names)


def _assistant_message(blocks: Sequence[AnyBlock]) -> ChatMessage:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = tuple(block.as_past_call() for block in blocks if isinstance(block, ToolUseBlock))
    return ChatMessage(
        "assistant", text_of(blocks), calls, reasoning="\n".join(thoughts) if thoughts else None
    )


def _user_messages(blocks: Sequence[AnyBlock], names: Mapping[str, str]) -> Iterator[ChatMessage]:
    """Each result is a message of its own; the texts between them are one. `names`: of the tools,
    by the id of the call."""
    if not blocks:
        yield ChatMessage("user", "")
    for kind, group in groupby(blocks, key=type):
        if kind is TextBlock:
            yield ChatMessage("user", text_of(list(group)))
            continue
        for result in group:
            assert isinstance(result, ToolResultBlock)
            call_id = result.tool_use_id
            yield ChatMessage("tool", result.text, call_id=call_id, tool_name=names.get(call_id))
