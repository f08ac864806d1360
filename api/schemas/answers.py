"""Response schemas of the OpenAI-compatible routes. msgspec encodes a chunk in under 1 µs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET

from ...adapters.classification import Task
from ..contract.answer_model import Absent, AnswerModel

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class PromptTokensDetails(AnswerModel):
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionTokensDetails(AnswerModel):
    accepted_prediction_tokens: int
    """Draft tokens that are in the answer."""
    rejected_prediction_tokens: int
    """Other draft tokens; not part of `completion_tokens`."""
    reasoning_tokens: int = 0
    """Tokens of the reasoning, its markers included; part of `completion_tokens`."""


@dataclass(frozen=True, slots=True)
class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


# --- chat ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int]


@dataclass(frozen=True, slots=True)
class ChatLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@dataclass(frozen=True, slots=True)
class ChatLogprobs(AnswerModel):
    content: list[ChatLogprob]
    refusal: None = None


@dataclass(frozen=True, slots=True)
class CalledFunction(AnswerModel):
    name: str
    arguments: str
    """A JSON object; truncated if the answer is."""


@dataclass(frozen=True, slots=True)
class ToolCall(AnswerModel):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class ChatMessage(AnswerModel):
    content: str | None
    """Null if the output consists of tool calls or reasoning only."""
    reasoning_content: str | Absent = UNSET
    reasoning: str | Absent = UNSET
    """The same, under its newer name."""
    tool_calls: list[ToolCall] | Absent = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


@dataclass(frozen=True, slots=True)
class ChatChoice(AnswerModel):
    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None


@dataclass(frozen=True, slots=True)
class ChatCompletion(AnswerModel):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


@dataclass(frozen=True, slots=True)
class FunctionDelta(AnswerModel):
    arguments: str
    name: str | Absent = UNSET


@dataclass(frozen=True, slots=True)
class ToolCallDelta(AnswerModel):
    """The first delta of a call has its id and name, the others the next piece of its arguments."""

    index: int
    function: FunctionDelta
    id: str | Absent = UNSET
    type: Literal["function"] | Absent = UNSET


@dataclass(frozen=True, slots=True)
class ChatDelta(AnswerModel):
    role: Literal["assistant"] | Absent = UNSET
    content: str | Absent | None = UNSET
    reasoning_content: str | Absent = UNSET
    reasoning: str | Absent = UNSET
    """The same, under its newer name."""
    tool_calls: list[ToolCallDelta] | Absent = UNSET


@dataclass(frozen=True, slots=True)
class ChatChunkChoice(AnswerModel):
    index: int
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    logprobs: ChatLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChatChunk(AnswerModel):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | Absent | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


# --- plain completions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletionLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass(frozen=True, slots=True)
class PromptLogprob(AnswerModel):
    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""As vLLM gives them: for each token of the prompt its own entry and the likeliest ones', by token
id; None for the first."""


@dataclass(frozen=True, slots=True)
class CompletionChoice(AnswerModel):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | Absent = UNSET


@dataclass(frozen=True, slots=True)
class Completion(AnswerModel):
    """A whole answer, or a chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | Absent | None = UNSET
    object: Literal["text_completion"] = "text_completion"


# --- models -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelCard(AnswerModel):
    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    task: Task = Task.GENERATE
    """`classify` for a classifier, else `generate`; of several versions that of the newest one."""
    object: Literal["model"] = "model"


@dataclass(frozen=True, slots=True)
class ModelList(AnswerModel):
    data: list[ModelCard]
    object: Literal["list"] = "list"
