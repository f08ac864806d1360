"""Schemas of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class ActorView(AnswerModel):
    """The caller, or the actor of a change."""

    kind: str
    """`operator`, `user`, `key`, or `system` for the server itself."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class TenantName(AnswerModel):
    id: str
    slug: str


@dataclass(frozen=True, slots=True)
class MeView(AnswerModel):
    """The caller and its permissions."""

    actor: ActorView
    tenant: TenantName | None
    """Null for an operator who names no tenant."""
    operator_role: str | None
    """Null for a tenant's key."""
    scopes: Sequence[str]
    """Scopes in the tenant; for an operator who names none, in any tenant."""
    adapters: Sequence[str] | None
    networks: Sequence[str] | None
    key: str | None
    """The id of the tenant's key."""
    expires_at: datetime | None
    object: Literal["me"] = "me"
