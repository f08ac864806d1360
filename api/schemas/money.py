"""Schemas of prices, budgets, and limits of users and keys. Amounts of money are decimal
strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from ...platform.budgets.service import DEFAULT_ALERTS, MAX_ALERTS
from ...platform.names import MAX_SLUG_LENGTH
from ...platform.prices.models import CURRENCY_LENGTH, MAX_BASE_LENGTH
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .quotas import Flow

Money = Annotated[str, StringConstraints(min_length=1, max_length=20)]


class PriceBody(RequestModel):
    """The prices of a base model's tokens, of a million each, such as `"0.15"`."""

    base: Annotated[str, StringConstraints(min_length=1, max_length=MAX_BASE_LENGTH)] | None = None
    """The name of the base in `/v1/models`; null: the one that this server serves."""
    tenant: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SLUG_LENGTH)] | None = (
        None
    )
    """The slug of the only tenant they are for; null: all tenants without prices of their own."""
    currency: Annotated[
        str, StringConstraints(min_length=CURRENCY_LENGTH, max_length=CURRENCY_LENGTH)
    ]
    """Three capital letters; the same in all prices."""
    prompt_tokens: Money
    cached_tokens: Money | None = None
    """Prompt tokens found in the prefix cache; null: as `prompt_tokens`."""
    completion_tokens: Money
    trained_tokens: Money | None = None
    """Of fine-tuning jobs; null: they are free."""
    batch_discount: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent, on requests of batches."""
    effective_from: AwareDatetime | None = None
    """At least 30 seconds ahead; null: as soon as possible."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "currency": "EUR",
            "prompt_tokens": "0.15",
            "cached_tokens": "0.0375",
            "completion_tokens": "0.60",
            "batch_discount": 50,
        },
    )


class PriceEndBody(RequestModel):
    """Which prices of a tenant end."""

    tenant: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SLUG_LENGTH)]
    """The tenant's slug."""
    base: Annotated[str, StringConstraints(min_length=1, max_length=MAX_BASE_LENGTH)] | None = None
    """The name of the base in `/v1/models`; null: the one that this server serves."""
    effective_from: AwareDatetime | None = None
    """At least 30 seconds ahead; null: as soon as possible."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"tenant": "acme", "effective_from": "2030-01-01T00:00:00Z"},
    )


@dataclass(frozen=True, slots=True)
class PriceView(AnswerModel):
    """The prices of a base model's tokens, of a million each."""

    id: int
    base: str
    tenant: str | None
    """The slug of the only tenant they are for; null: all tenants without prices of their own."""
    currency: str
    prompt_tokens: str
    cached_tokens: str
    completion_tokens: str
    trained_tokens: str
    """Of fine-tuning jobs."""
    batch_discount: int
    """Percent."""
    effective_from: datetime
    effective_until: datetime | None
    """When later prices supersede them, or the tenant's own prices end; null: neither is set."""
    created_at: datetime
    object: Literal["price"] = "price"


class BudgetBody(RequestModel):
    """What may be spent in each period."""

    amount: Money
    alert_percents: Annotated[
        list[Annotated[int, Field(ge=1, le=100)]],
        Field(max_length=MAX_ALERTS, default_factory=lambda: list(DEFAULT_ALERTS)),
    ]
    """By default 50, 80 and 100; each makes one alert in a period when so much is spent."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"amount": "250.00", "alert_percents": [50, 80, 100]},
    )


@dataclass(frozen=True, slots=True)
class BudgetView(AnswerModel):
    """A budget and its use in the present period."""

    holder: Literal["tenant", "user", "key"]
    id: str | None
    """Of the user or key; null for the tenant's."""
    name: str | None
    """The user's email address, or the key's name; null for the tenant's."""
    period: str
    currency: str | None
    """Null: there are no prices yet."""
    amount: str
    alert_percents: list[int]
    spent: str
    reserved: str
    """The most that running requests cost; not part of `spent`."""
    remaining: str
    period_begins_at: datetime
    period_ends_at: datetime
    object: Literal["budget"] = "budget"


class CallerLimitsBody(RequestModel):
    """All limits of a user or key; omitted or null means unlimited."""

    requests_per_minute: Flow = None
    input_tokens_per_minute: Flow = None
    output_tokens_per_minute: Flow = None
    concurrent_requests: Flow = None

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"requests_per_minute": 60, "concurrent_requests": 4},
    )


@dataclass(frozen=True, slots=True)
class CallerLimitsView(AnswerModel):
    """The limits of a user or key, besides those of the tenant; null means unlimited."""

    requests_per_minute: int | None
    input_tokens_per_minute: int | None
    output_tokens_per_minute: int | None
    concurrent_requests: int | None
    object: Literal["limits"] = "limits"
