"""Response schemas of finished and running requests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class RequestView(AnswerModel):
    """One finished or refused request. Times in milliseconds; null: unknown."""

    id: str
    tenant: str
    created_at: datetime
    """End time."""
    route: str
    status: int
    """0: the client disconnected before the response."""
    error_code: str | None
    model: str | None
    """The resolved name; for a request refused earlier, the name as sent."""
    adapter: str | None
    adapter_version: int | None
    key_id: str | None
    finish_reason: str | None
    tier: str | None
    """The adapter's tier when the request arrived."""
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    queue_ms: float | None
    """From arrival in the engine to the first step, including `adapter_wait_ms`."""
    adapter_wait_ms: float | None
    load_ms: float | None
    first_token_ms: float | None
    """From arrival to the first token."""
    total_ms: float


@dataclass(frozen=True, slots=True)
class PhaseView(AnswerModel):
    """One phase of a request."""

    phase: str
    """`queue`, `adapter`, `prompt`, `output`, or `refused`."""
    ms: float
    summary: str


@dataclass(frozen=True, slots=True)
class ExplanationView(AnswerModel):
    """A request, its phases and a one-sentence summary."""

    request: RequestView
    summary: str
    phases: list[PhaseView]


@dataclass(frozen=True, slots=True)
class LiveRequestView(AnswerModel):
    """One sequence in the engine now."""

    request_id: str
    index: int
    """Index of the sequence in its request."""
    tenant: str
    model: str | None
    """The resolved name; null for the server's own probes."""
    state: str
    """`waiting`, `prefilling` or `decoding`."""
    waits_for: str | None
    """`grammar`, `adapter`, `sequences`, `kv_blocks` or `turn`."""
    reason: str | None
    """The reason as a sentence."""
    age_ms: float
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    priority: int


@dataclass(frozen=True, slots=True)
class LiveRequestsView(AnswerModel):
    """The oldest sequences in this server's engine."""

    data: list[LiveRequestView]
    num_sequences: int
    """Total number, including those beyond the limit."""
