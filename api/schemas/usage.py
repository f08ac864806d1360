"""Response schemas of usage."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime

from msgspec import UNSET

from ..contract.answer_model import Absent, AnswerModel


@dataclass(frozen=True, slots=True)
class UsageView(AnswerModel):
    """Sums of one group; fields that are not grouped by are absent."""

    tenant: str | Absent = UNSET
    """Its slug."""
    day: date | Absent = UNSET
    """In UTC."""
    adapter: str | Absent | None = UNSET
    """Null: the base model."""
    version: int | Absent | None = UNSET
    """Null: the base model, or the training of the adapter."""
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` found in the prefix cache."""
    completion_tokens: int = 0
    cold_loads: int = 0
    """Requests that waited for their adapter's weights."""
    residency_byte_seconds: int = 0
    """Bytes on the device × time."""
    trained_tokens: int = 0
    """Tokens that fine-tuning jobs trained on."""
    amount: str = "0.00"
    """What the requests were charged, as a decimal string."""
    currency: str | None = None
    """Of `amount`; null: there are no prices."""
    step_seconds: float = 0.0
    """The requests' shares of the engine's steps."""
    kv_byte_seconds: int = 0
    """Bytes of KV blocks on the device × time; a shared block is divided among its holders."""
    loaded_bytes: int = 0
    """Bytes of adapters that were copied to the device for the requests."""
    fetched_bytes: int = 0
    """The part of `loaded_bytes` that was read from the object store."""
    cost: str | Absent = UNSET
    """What that costs the operator, as a decimal string in `currency`; for operators only."""
    margin: str | Absent = UNSET
    """`amount` less `cost`; for operators only."""


@dataclass(frozen=True, slots=True)
class UsageRecordView(AnswerModel):
    """The ledger entry of one request."""

    request_id: str
    adapter: str | None
    """Null for the base model, like the next two fields."""
    version: int | None
    digest: str | None
    composition: str | None
    """All adapters of a composition with their weights; the fields above then name its first
    adapter and the composition's digest. Null: one adapter, or none."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    """`aborted` if the answer is incomplete."""
    tier: str | None
    """The adapter's tier when the request arrived."""
    load_ms: float | None
    """Duration of the load that it waited for."""
    key_id: str | None
    user_id: str | None
    """The user who called, or who owns the key."""
    price_id: int | None
    """The price that it was charged by; null: there was none."""
    amount: str
    """What it was charged, as a decimal string."""
    ended_at: datetime
    step_seconds: float
    """Its shares of the engine's steps."""
    kv_byte_seconds: int
    """Bytes of KV blocks on the device × time; a shared block is divided among its holders."""
    loaded_bytes: int
    """Bytes of its adapter that were copied to the device for it."""
    fetched_bytes: int
    """The part of `loaded_bytes` that was read from the object store."""
    object: str = "usage.record"
