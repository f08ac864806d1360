"""Response schemas of `/v1/messages`: the message, its blocks and its stream events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import UNSET
from pydantic import Field

from ..contract.answer_model import Absent, AnswerModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@dataclass(frozen=True, slots=True)
class AnswerText(AnswerModel):
    text: str
    type: Literal["text"] = "text"
    citations: None = None
    """Always null: nothing creates citations."""


@dataclass(frozen=True, slots=True)
class AnswerToolUse(AnswerModel):
    id: str
    name: str
    input: dict[str, Any]
    """Of an answer that `max_tokens` ended: what was complete."""
    type: Literal["tool_use"] = "tool_use"


@dataclass(frozen=True, slots=True)
class AnswerThinking(AnswerModel):
    """The reasoning, if the request has `thinking`."""

    thinking: str
    type: Literal["thinking"] = "thinking"
    signature: Literal[""] = ""
    """Always empty: reasoning that is sent back is not verified."""


AnswerBlock = Annotated[AnswerText | AnswerThinking | AnswerToolUse, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class MessageUsage(AnswerModel):
    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_read_input_tokens: int
    """Further tokens of the prompt, reused from the prefix cache."""
    output_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    """Always 0: cache writes are not billed separately."""


@dataclass(frozen=True, slots=True)
class AnswerMessage(AnswerModel):
    """A message of the assistant."""

    id: str
    model: str
    """The pinned name of what answered."""
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    """Null at the beginning of a stream."""
    stop_sequence: str | None
    """The stop sequence that ended the answer."""
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


@dataclass(frozen=True, slots=True)
class TextDelta(AnswerModel):
    text: str
    type: Literal["text_delta"] = "text_delta"


@dataclass(frozen=True, slots=True)
class ThinkingDelta(AnswerModel):
    thinking: str
    type: Literal["thinking_delta"] = "thinking_delta"


@dataclass(frozen=True, slots=True)
class InputJsonDelta(AnswerModel):
    partial_json: str
    type: Literal["input_json_delta"] = "input_json_delta"


BlockDelta = TextDelta | ThinkingDelta | InputJsonDelta


@dataclass(frozen=True, slots=True)
class StopDelta(AnswerModel):
    stop_reason: StopReason
    stop_sequence: str | None


@dataclass(frozen=True, slots=True)
class MessageEvent(AnswerModel):
    """An event of a stream; `type` says which fields it has."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: AnswerMessage | Absent = field(default=UNSET, kw_only=True)
    index: int | Absent = field(default=UNSET, kw_only=True)
    """Of the block."""
    content_block: AnswerBlock | Absent = field(default=UNSET, kw_only=True)
    delta: BlockDelta | StopDelta | Absent = field(default=UNSET, kw_only=True)
    usage: MessageUsage | Absent = field(default=UNSET, kw_only=True)


@dataclass(frozen=True, slots=True)
class TokenCount(AnswerModel):
    input_tokens: int
