"""What callers are told about what was used."""

from __future__ import annotations

from datetime import date, datetime

import msgspec
from msgspec import UNSET, UnsetType


class UsageView(msgspec.Struct, frozen=True):
    """Sums of one group; what it is not grouped by is not there."""

    tenant: str | UnsetType = UNSET
    """Its slug."""
    day: date | UnsetType = UNSET
    """In UTC."""
    adapter: str | UnsetType | None = UNSET
    """None is the base model."""
    version: int | UnsetType | None = UNSET
    """None is the base model."""
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`, those that the prefix cache held."""
    completion_tokens: int = 0
    cold_loads: int = 0
    """Requests that waited for their adapter's weights."""
    residency_byte_seconds: int = 0
    """Bytes on the device times how long they were there."""


class UsageRecordView(msgspec.Struct, frozen=True):
    """The ledger's row of one request."""

    request_id: str
    adapter: str | None
    """None for the base model, as the two below."""
    version: int | None
    digest: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    """`aborted` if the answer was not whole."""
    tier: str | None
    """Where the adapter was when the request came."""
    load_ms: float | None
    """How long the load took that it waited for."""
    key_id: str | None
    ended_at: datetime
    object: str = "usage.record"
