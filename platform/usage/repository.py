"""Queries on the usage ledger."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, Select, func, select

from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from .models import UsageRecord


class UsageTotal(NamedTuple):
    """Sums over requests of one tenant with one adapter."""

    tenant_slug: str
    adapter_name: str | None
    """None for the base model."""
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def find(session: TenantSession, request_id: str) -> UsageRecord | None:
    """The tenant's row of this request."""
    query = select(UsageRecord).where(UsageRecord.request_id == request_id)
    return session.scalars(query).one_or_none()


def sum_by_adapter(
    session: TenantSession, since: datetime, until: datetime
) -> Sequence[UsageTotal]:
    """The tenant's sums in `[since, until)`, by adapter name, the base model first."""
    return _totals(session.execute(_sums(since, until)).all())


def sum_by_adapter_of_all_tenants(
    session: PlatformSession, since: datetime, until: datetime
) -> Sequence[UsageTotal]:
    """Every tenant's sums in `[since, until)`, by tenant and adapter name."""
    return _totals(session.execute(_sums(since, until)).all())


def _sums(since: datetime, until: datetime) -> Select[str, str | None, int, int, int, int]:
    group = (Tenant.slug, UsageRecord.adapter_name)
    return (
        select(
            *group,
            func.count(),
            func.sum(UsageRecord.prompt_tokens),
            func.sum(UsageRecord.cached_tokens),
            func.sum(UsageRecord.completion_tokens),
        )
        .join(Tenant, Tenant.id == UsageRecord.tenant_id)
        .where(UsageRecord.created_at >= since, UsageRecord.created_at < until)
        .group_by(*group)
        .order_by(Tenant.slug, UsageRecord.adapter_name.nulls_first())
    )


def _totals(rows: Sequence[Row[*tuple[Any, ...]]]) -> list[UsageTotal]:
    return [UsageTotal._make(row) for row in rows]
