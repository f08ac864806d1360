"""What is answered about requests: those that ended, and those that run."""

from __future__ import annotations

from datetime import datetime

import msgspec


class RequestView(msgspec.Struct, frozen=True):
    """One request that has ended, answered or refused. Times in milliseconds; null is unknown."""

    id: str
    tenant: str
    created_at: datetime
    """When it had ended."""
    route: str
    status: int
    """0: the caller went away before there was an answer."""
    error_code: str | None
    model: str | None
    """The pinned name; of a request that was refused before, the name as it was sent."""
    adapter: str | None
    adapter_version: int | None
    key_id: str | None
    finish_reason: str | None
    tier: str | None
    """Where the adapter was when the request came."""
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    queue_ms: float | None
    """From arrival in the engine to the first step, `adapter_wait_ms` included."""
    adapter_wait_ms: float | None
    load_ms: float | None
    first_token_ms: float | None
    """From arrival to the first token."""
    total_ms: float


class PhaseView(msgspec.Struct, frozen=True):
    """A part of a request's time."""

    phase: str
    """`queue`, `adapter`, `prompt`, `output`, or `refused`."""
    ms: float
    summary: str


class ExplanationView(msgspec.Struct, frozen=True):
    """A request, where its time went, and in a sentence what there is to know."""

    request: RequestView
    summary: str
    phases: list[PhaseView]


class LiveRequestView(msgspec.Struct, frozen=True):
    """One sequence in the engine now."""

    request_id: str
    index: int
    """Which of the request's sequences it is."""
    tenant: str
    model: str | None
    """The pinned name; null for the server's own probes."""
    state: str
    """`waiting`, `prefilling` or `decoding`."""
    waits_for: str | None
    """`grammar`, `adapter`, `sequences`, `kv_blocks` or `turn`."""
    reason: str | None
    """That, in words."""
    age_ms: float
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    priority: int


class LiveRequestsView(msgspec.Struct, frozen=True):
    """The oldest sequences in this server's engine."""

    data: list[LiveRequestView]
    num_sequences: int
    """All there are; more than `data` if the limit cut it."""
