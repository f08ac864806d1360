"""Response schemas of `/v1/responses`: the response, its items and its stream events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..contract.errors import ErrorBody
from .answers import ChatLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True):
    text: str
    annotations: list[str] = []
    """Always empty: no tool creates citations."""
    logprobs: list[ChatLogprob] = []
    type: Literal["output_text"] = "output_text"


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = MessageItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: Literal[0] = 0
    """Always 0: cache writes are not billed separately."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    accepted_prediction_tokens: int
    """Draft tokens that are in the answer."""
    rejected_prediction_tokens: int
    """Other draft tokens; not part of `output_tokens`."""
    reasoning_tokens: Literal[0] = 0
    """Always 0: reasoning is counted as output."""


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, frozen=True):
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
    previous_response_id: None = None
    store: Literal[False] = False
    """Responses are not stored."""
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(msgspec.Struct, frozen=True):
    """An event of a stream; its type determines the other fields."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ErrorEvent(msgspec.Struct, frozen=True):
    """The last event of a failed stream: OpenAI's fields and the error envelope."""

    sequence_number: int
    code: str
    message: str
    param: str | None
    error: ErrorBody
    type: Literal["error"] = "error"
