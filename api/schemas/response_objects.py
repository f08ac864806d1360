"""Response schemas of `/v1/responses`: the response, its items and its stream events."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import UNSET
from pydantic import Field

from ..contract.answer_model import Absent, AnswerModel
from ..contract.errors import ErrorBody
from .answers import ChatLogprob

Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class OutputText(AnswerModel):
    text: str
    annotations: list[str] = field(default_factory=list)
    """Always empty: no tool creates citations."""
    logprobs: list[ChatLogprob] = field(default_factory=list)
    type: Literal["output_text"] = "output_text"


@dataclass(frozen=True, slots=True)
class MessageItem(AnswerModel):
    type: Literal["message"] = field(default="message", kw_only=True)
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


@dataclass(frozen=True, slots=True)
class FunctionCallItem(AnswerModel):
    type: Literal["function_call"] = field(default="function_call", kw_only=True)
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


@dataclass(frozen=True, slots=True)
class ReasoningText(AnswerModel):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


@dataclass(frozen=True, slots=True)
class ReasoningItem(AnswerModel):
    type: Literal["reasoning"] = field(default="reasoning", kw_only=True)
    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[str] = field(default_factory=list)
    """Always empty: the reasoning itself is in `content`."""


OutputItem = Annotated[MessageItem | FunctionCallItem | ReasoningItem, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class InputTokensDetails(AnswerModel):
    cached_tokens: int
    cache_write_tokens: Literal[0] = 0
    """Always 0: cache writes are not billed separately."""


@dataclass(frozen=True, slots=True)
class OutputTokensDetails(AnswerModel):
    accepted_prediction_tokens: int
    """Draft tokens that are in the answer."""
    rejected_prediction_tokens: int
    """Other draft tokens; not part of `output_tokens`."""
    reasoning_tokens: int
    """Tokens of the reasoning, its markers included; part of `output_tokens`."""


@dataclass(frozen=True, slots=True)
class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@dataclass(frozen=True, slots=True)
class IncompleteDetails(AnswerModel):
    reason: Literal["max_output_tokens"]


@dataclass(frozen=True, slots=True)
class Response(AnswerModel):
    """A response; it repeats the parameters of its request."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    user: str | None
    background: Literal[False] = False
    error: None = None
    """Always null: a failure returns an error instead."""
    object: Literal["response"] = "response"
    previous_response_id: str | None = None
    store: bool = False
    """Whether the response is stored."""
    truncation: Literal["disabled"] = "disabled"


@dataclass(frozen=True, slots=True)
class StoredResponseView(AnswerModel):
    """A stored response in a list, without its content."""

    id: str
    previous_response_id: str | None
    """The response that it continues, which may have been deleted."""
    key_id: str | None
    """Null: a user in a session, or an operator."""
    size_bytes: int
    created_at: datetime
    expires_at: datetime
    object: Literal["stored_response"] = "stored_response"


@dataclass(frozen=True, slots=True)
class DeletedResponse(AnswerModel):
    id: str
    deleted: Literal[True] = True
    object: Literal["response"] = "response"


@dataclass(frozen=True, slots=True)
class ResponseEvent(AnswerModel):
    """An event of a stream; its type determines the other fields."""

    type: str
    sequence_number: int
    response: Response | Absent = UNSET
    output_index: int | Absent = UNSET
    content_index: int | Absent = UNSET
    item_id: str | Absent = UNSET
    item: OutputItem | Absent = UNSET
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")] | Absent = UNSET
    delta: str | Absent = UNSET
    text: str | Absent = UNSET
    logprobs: list[ChatLogprob] | Absent = UNSET
    name: str | Absent = UNSET
    arguments: str | Absent = UNSET


@dataclass(frozen=True, slots=True)
class ErrorEvent(AnswerModel):
    """The last event of a failed stream: OpenAI's fields and the error envelope."""

    sequence_number: int
    code: str
    message: str
    param: str | None
    error: ErrorBody
    type: Literal["error"] = "error"
