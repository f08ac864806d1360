"""Response schemas of `/v1/audit` and `/admin/audit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..contract.answer_model import AnswerModel
from .me import ActorView


@dataclass(frozen=True, slots=True)
class AuditEntryView(AnswerModel):
    """One change."""

    number: int
    """Number in its chain, from 1 without gaps."""
    at: datetime
    actor: ActorView
    action: str
    resource: str
    details: Mapping[str, Any]
    request_id: str | None
    address: str | None
    hash: str
    """Keyed hash of the entry and the previous entry's hash, hexadecimal."""


@dataclass(frozen=True, slots=True)
class BreachView(AnswerModel):
    """The first entry that fails verification."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class VerificationView(AnswerModel):
    """Result of verifying a chain."""

    chain: str
    """`platform`, or a tenant's slug."""
    is_intact: bool
    """No fault was found so far."""
    is_finished: bool
    """If false, there are more entries: continue with `after` = `last_number`."""
    last_number: int
    """The last entry that was verified."""
    breach: BreachView | None
