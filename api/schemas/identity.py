"""Schemas of tenants, operators, users and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from ...platform.identities.models import MAX_SUBJECT_LENGTH
from ...platform.keys.principal import OperatorRole, Scope, TenantRole
from ...platform.keys.stored_key import MAX_KEY_NAME_LENGTH
from ...platform.names import MAX_NAME_LENGTH, MAX_SLUG_LENGTH
from ...platform.quotas.models import Period
from ...platform.tenants.models import MAX_DISPLAY_NAME_LENGTH
from ...platform.tenants.service import MAX_WEIGHT, MIN_WEIGHT
from ...platform.users.models import MAX_EMAIL_LENGTH
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .slo import SloBody, SloView

MAX_LIFETIME_DAYS = 3650
MAX_ADAPTERS_PER_KEY = 100
MAX_NETWORKS_PER_KEY = 32
DEFAULT_OVERLAP_SECONDS = 24 * 3600
MAX_OVERLAP_SECONDS = 30 * 24 * 3600
DEFAULT_OPERATOR_KEY_DAYS = 90

KeyName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_KEY_NAME_LENGTH)]
DisplayName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_DISPLAY_NAME_LENGTH)]
Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
Networks = Annotated[list[str], Field(min_length=1, max_length=MAX_NETWORKS_PER_KEY)]
LifetimeDays = Annotated[int, Field(ge=1, le=MAX_LIFETIME_DAYS)]


# --- tenants ------------------------------------------------------------------------------------


class TenantBody(RequestModel):
    """A tenant to create."""

    slug: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SLUG_LENGTH)]
    name: DisplayName | None = None
    weight: Weight = 1.0
    slo: SloBody | None = None

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"slug": "acme", "name": "Acme Ltd.", "weight": 2.0},
    )


class TenantChange(RequestModel):
    """Omitted fields stay unchanged."""

    name: DisplayName | None = None
    weight: Weight = 1.0
    slo: SloBody | None = None
    """Replaces both targets; null removes them."""
    suspended: bool = False

    is_change: ClassVar[bool] = True
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"suspended": True},)


@dataclass(frozen=True, slots=True)
class TenantView(AnswerModel):
    """A tenant, as shown to operators."""

    id: str
    slug: str
    name: str | None
    weight: float
    slo: SloView
    created_at: datetime
    suspended_at: datetime | None
    object: Literal["tenant"] = "tenant"


@dataclass(frozen=True, slots=True)
class ObjectsRemovedView(AnswerModel):
    """Objects in the store besides those of adapters."""

    number: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TenantDeletionView(AnswerModel):
    """The deletion of a tenant, and its receipt."""

    id: str
    """The tenant's."""
    slug: str
    with_usage: bool
    requested_at: datetime
    finished_at: datetime | None
    """Null: it is not complete yet."""
    objects: ObjectsRemovedView | None
    """Null: the store has not been cleared yet."""
    rows: dict[str, int]
    """The number of rows that were deleted, by table."""
    object: Literal["tenant.deletion"] = "tenant.deletion"


@dataclass(frozen=True, slots=True)
class TokenBudgetView(AnswerModel):
    """A limit of prompt and completion tokens."""

    tokens: int
    period: Period
    used: int
    """In the current period."""


@dataclass(frozen=True, slots=True)
class TenantSummaryView(AnswerModel):
    """A tenant in a list."""

    id: str
    slug: str
    name: str | None
    weight: float
    slo: SloView
    created_at: datetime
    suspended_at: datetime | None
    requests: int
    """In the last 30 days, like `tokens`."""
    tokens: int
    """Prompt and completion tokens."""
    budget: TokenBudgetView | None
    """Null: its tokens are not limited."""
    object: Literal["tenant"] = "tenant"


# --- operators ----------------------------------------------------------------------------------


class OperatorBody(RequestModel):
    """An operator to create; its key is created separately."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_LENGTH)]
    role: OperatorRole = OperatorRole.VIEWER

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"name": "anna", "role": "admin"},)


class OperatorChange(RequestModel):
    """Omitted fields stay unchanged."""

    role: OperatorRole = OperatorRole.VIEWER
    disabled: bool = False

    is_change: ClassVar[bool] = True
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"role": "viewer"},)


@dataclass(frozen=True, slots=True)
class OperatorView(AnswerModel):
    id: str
    name: str
    role: str
    created_at: datetime
    disabled_at: datetime | None
    object: Literal["operator"] = "operator"


class OperatorKeyBody(RequestModel):
    """A key to create for an operator."""

    name: KeyName = "default"
    expires_in_days: LifetimeDays | None = DEFAULT_OPERATOR_KEY_DAYS
    """Null: never."""
    networks: Networks | None = None
    """Networks it can be used from, in CIDR notation; null: any."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"name": "laptop", "expires_in_days": 30},)


@dataclass(frozen=True, slots=True)
class OperatorKeyView(AnswerModel):
    id: str
    name: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: Annotated[datetime | None, Field(description="Accurate to the hour.")]
    networks: Annotated[
        list[str] | None, Field(description="Networks it can be used from; null: any.")
    ] = None
    object: Literal["operator.key"] = "operator.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedOperatorKeyView(OperatorKeyView):
    """A key that was just created."""

    key: str
    """The key itself; only in this response."""


# --- users --------------------------------------------------------------------------------------


class UserBody(RequestModel):
    """A user to create."""

    email: Annotated[str, StringConstraints(min_length=3, max_length=MAX_EMAIL_LENGTH)]
    role: TenantRole = TenantRole.VIEWER

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"email": "ben@acme.example", "role": "developer"},
    )


class UserChange(RequestModel):
    """Omitted fields stay unchanged."""

    role: TenantRole = TenantRole.VIEWER
    disabled: bool = False

    is_change: ClassVar[bool] = True
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"disabled": True},)


@dataclass(frozen=True, slots=True)
class UserView(AnswerModel):
    id: str
    email: str
    role: str
    created_at: datetime
    disabled_at: datetime | None
    object: Literal["user"] = "user"


class IdentityBody(RequestModel):
    """A person at the identity provider."""

    subject: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SUBJECT_LENGTH)]
    """The claim `sub` of the person's ID tokens."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"subject": "248289761001"},)


@dataclass(frozen=True, slots=True)
class IdentityView(AnswerModel):
    """The person at the identity provider who signs in as the user."""

    issuer: str
    subject: str
    created_at: datetime
    """Since when the user has it."""
    object: Literal["identity"] = "identity"


# --- keys ---------------------------------------------------------------------------------------


class KeyBody(RequestModel):
    """A key to create."""

    name: KeyName
    scopes: Annotated[list[Scope], Field(min_length=1)]
    adapters: Annotated[list[str], Field(min_length=1, max_length=MAX_ADAPTERS_PER_KEY)] | None = (
        None
    )
    """The only adapters that the key can use, by name; null: all, and the base model."""
    networks: Networks | None = None
    """Networks it can be used from, in CIDR notation; null: any."""
    expires_in_days: LifetimeDays | None = None
    """Null: never."""
    user: Annotated[str, StringConstraints(max_length=64)] | None = None
    """The id of the key's user; the key never has more permissions than its user."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "name": "ci",
            "scopes": ["infer", "adapters:read"],
            "adapters": ["support-bot"],
            "expires_in_days": 90,
        },
    )


class RotateBody(RequestModel):
    """When the old key expires."""

    overlap_seconds: Annotated[int, Field(ge=0, le=MAX_OVERLAP_SECONDS)] = DEFAULT_OVERLAP_SECONDS
    """How long the old key stays valid beside the new one."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"overlap_seconds": 3600},)


@dataclass(frozen=True, slots=True)
class KeyView(AnswerModel):
    """A key, without its secret."""

    volatile: ClassVar[tuple[str, ...]] = ("last_used_at",)

    id: str
    name: str
    scopes: Sequence[str]
    adapters: Sequence[str] | None
    networks: Sequence[str] | None
    user: str | None
    created_at: datetime
    created_by: Annotated[str, Field(description="Creator, as `kind:id`.")]
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: Annotated[datetime | None, Field(description="Accurate to the hour.")]
    successor: Annotated[str | None, Field(description="The id of the key that replaces it.")]
    object: Literal["key"] = "key"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKeyView(KeyView):
    """A key that was just created."""

    key: str
    """The key itself; only in this response."""
