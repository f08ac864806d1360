"""Schemas of a tenant's limits, usage and remaining amounts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...platform.quotas.limits import MAX_BIG, MAX_COUNT
from ...platform.quotas.models import Period
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel

Flow = Annotated[int, Field(ge=1, le=MAX_COUNT)] | None
BigFlow = Annotated[int, Field(ge=1, le=MAX_BIG)] | None
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)] | None
BigCount = Annotated[int, Field(ge=0, le=MAX_BIG)] | None


class LimitsBody(RequestModel):
    """All limits of a tenant; omitted or null means unlimited."""

    requests_per_minute: Flow = None
    input_tokens_per_minute: Flow = None
    output_tokens_per_minute: Flow = None
    concurrent_requests: Flow = None
    tokens_per_period: BigFlow = None
    """Prompt and completion tokens together."""
    trained_tokens_per_period: BigCount = None
    """Of all fine-tuning jobs together. 0: the tenant trains nothing."""
    period: Period = Period.MONTH
    adapters: Count = None
    versions_per_adapter: Count = None
    stored_bytes: BigCount = None
    keys: Count = None
    users: Count = None

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "requests_per_minute": 600,
            "concurrent_requests": 16,
            "tokens_per_period": 50_000_000,
            "period": "month",
        },
    )


@dataclass(frozen=True, slots=True)
class LimitsView(AnswerModel):
    """A tenant's limits; null means unlimited."""

    tenant: str
    """Its slug."""
    requests_per_minute: int | None
    input_tokens_per_minute: int | None
    output_tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_period: int | None
    trained_tokens_per_period: int | None
    period: str
    adapters: int | None
    versions_per_adapter: int | None
    stored_bytes: int | None
    keys: int | None
    users: int | None
    object: Literal["quota"] = "quota"


@dataclass(frozen=True, slots=True)
class LimitUseView(AnswerModel):
    """One limit and its usage."""

    limit: int | None
    """Null means unlimited."""
    used: int | None
    """Null if usage is not counted because there is no limit."""
    reserved: int
    """Reserved by running requests; not part of `used`."""
    remaining: int | None
    reset_seconds: float | None
    """For a rate: time until it is fully available if nothing is used."""


@dataclass(frozen=True, slots=True)
class QuotaUseView(AnswerModel):
    """A tenant's limits and their usage."""

    requests_per_minute: LimitUseView
    input_tokens_per_minute: LimitUseView
    output_tokens_per_minute: LimitUseView
    concurrent_requests: LimitUseView
    tokens_per_period: LimitUseView
    trained_tokens_per_period: LimitUseView
    adapters: LimitUseView
    versions_per_adapter: LimitUseView
    """Usage of the adapter with the most versions."""
    stored_bytes: LimitUseView
    keys: LimitUseView
    users: LimitUseView
    period: str
    period_begins_at: datetime
    period_ends_at: datetime
    object: Literal["quota.use"] = "quota.use"
