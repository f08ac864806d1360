"""Lists of tenants with their usage, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import and_, func, select, tuple_

from ..base import utc_now
from ..quotas.models import Period, PeriodUse, Quota
from ..quotas.period import begin_of
from ..sessions import PlatformSession
from ..usage.models import UsageDay
from . import repository
from .models import Tenant

NUM_DAYS = 30
"""Those whose usage is summed: today and the days before it, in UTC."""


class TokenBudget(NamedTuple):
    """A tenant's limit of tokens, and its usage in the current period."""

    tokens: int
    period: Period
    used: int


class TenantSummary(NamedTuple):
    tenant: Tenant
    num_requests: int
    num_tokens: int
    """Prompt and completion tokens, like `num_requests` of the last `NUM_DAYS` days."""
    budget: TokenBudget | None
    """None: its tokens are not limited."""


def list_summaries(
    session: PlatformSession,
    *,
    after: str | None = None,
    limit: int | None = None,
    is_suspended: bool | None = None,
    search: str | None = None,
) -> Sequence[TenantSummary]:
    """Tenants by slug: at most `limit` after the slug `after`.

    `search`: a part of the slug or the display name, in either case.
    """
    tenants = repository.list_tenants(
        session, after=after, limit=limit, is_suspended=is_suspended, search=search
    )
    ids, now = [tenant.id for tenant in tenants], utc_now()
    usages, budgets = _usages(session, ids, now), _budgets(session, ids, now)
    return [
        TenantSummary(tenant, *usages.get(tenant.id, (0, 0)), budgets.get(tenant.id))
        for tenant in tenants
    ]


def _usages(
    session: PlatformSession, ids: Sequence[str], now: datetime
) -> dict[str, tuple[int, int]]:
    """Requests and tokens by tenant."""
    tokens = func.sum(UsageDay.prompt_tokens + UsageDay.completion_tokens)
    query = (
        select(UsageDay.tenant_id, func.sum(UsageDay.num_requests), tokens)
        .where(UsageDay.tenant_id.in_(ids))
        .where(UsageDay.day > now.date() - timedelta(days=NUM_DAYS))
        .group_by(UsageDay.tenant_id)
    )
    return {row[0]: (int(row[1]), int(row[2])) for row in session.execute(query)}


def _budgets(session: PlatformSession, ids: Sequence[str], now: datetime) -> dict[str, TokenBudget]:
    """By tenant, of those that have one."""
    current = [(period, begin_of(period, now)) for period in Period]
    is_current = and_(
        PeriodUse.tenant_id == Quota.tenant_id,
        PeriodUse.period == Quota.period,
        tuple_(PeriodUse.period, PeriodUse.begins_at).in_(current),
    )
    query = (
        select(Quota.tenant_id, Quota.tokens_per_period, Quota.period, PeriodUse.tokens)
        .outerjoin(PeriodUse, is_current)
        .where(Quota.tenant_id.in_(ids))
    )
    return {
        tenant_id: TokenBudget(tokens, period, used or 0)
        for tenant_id, tokens, period, used in session.execute(query)
        if tokens is not None
    }
