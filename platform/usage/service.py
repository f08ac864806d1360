"""Counting what was used, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.exc import IntegrityError

from ..adapters.registry import AdapterRef
from ..quotas import service as quotas
from ..sessions import PlatformSession, TenantSession
from . import repository
from .models import UsageRecord
from .repository import UsageTotal


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request used until it ended, however it ended."""

    request_id: str
    adapter: AdapterRef | None
    """None is the base model."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tier: str | None
    finish_reason: str


def record(session: TenantSession, usage: Usage) -> bool:
    """Add the request to the tenant's ledger and settle it; False if it is there already."""
    row = _row(usage)
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError:
        if repository.find(session, usage.request_id) is None:
            raise
        return False
    quotas.settle(
        session,
        usage.request_id,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        at=row.created_at,
    )
    return True


def sum_by_adapter(
    session: TenantSession, *, since: datetime, until: datetime
) -> Sequence[UsageTotal]:
    """The tenant's sums in `[since, until)`, by adapter name, the base model first."""
    return repository.sum_by_adapter(session, since, until)


def sum_by_adapter_of_all_tenants(
    session: PlatformSession, *, since: datetime, until: datetime
) -> Sequence[UsageTotal]:
    """Every tenant's sums in `[since, until)`, by tenant and adapter name."""
    return repository.sum_by_adapter_of_all_tenants(session, since, until)


def _row(usage: Usage) -> UsageRecord:
    adapter = usage.adapter
    return UsageRecord(
        request_id=usage.request_id,
        adapter_name=adapter and adapter.name,
        adapter_version=adapter and adapter.version,
        adapter_digest=adapter and adapter.key.digest,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        tier=usage.tier,
        finish_reason=usage.finish_reason,
    )
