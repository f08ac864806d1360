"""How many requests an adapter had in the last days, kept beside its use so that lists sort by it.

The ledger's sums of days say so exactly. Adding up everybody's for each list takes most of a second
with thousands of adapters; one adapter's take a look-up a day.
"""

from __future__ import annotations

from datetime import date, timedelta

from sqlalchemy import func, select

from ..base import utc_now
from ..sessions import PlatformSession
from ..usage.models import UsageDay
from .models import AdapterUse

COUNTED_DAYS = 30
"""Requests of today and of so many days less one before it."""


def count_requests(session: PlatformSession, tenant_id: str, adapter_name: str) -> int:
    """The adapter's requests of the counted days."""
    query = select(func.sum(UsageDay.num_requests)).where(
        UsageDay.tenant_id == tenant_id,
        UsageDay.adapter_name == adapter_name,
        UsageDay.day >= _first_day(),
    )
    return int(session.scalar(query) or 0)


def users(session: PlatformSession) -> list[str]:
    """The ids of the tenants whose adapters were ever used."""
    return list(session.scalars(select(AdapterUse.tenant_id).distinct()))


def recount(session: PlatformSession, tenant_id: str) -> None:
    """Count the tenant's adapters anew: days pass also for those that nobody asks."""
    uses = select(AdapterUse).where(AdapterUse.tenant_id == tenant_id)
    for use in session.scalars(uses.order_by(AdapterUse.adapter_name).with_for_update()):
        use.num_requests = count_requests(session, tenant_id, use.adapter_name)


def _first_day() -> date:
    return utc_now().date() - timedelta(days=COUNTED_DAYS - 1)
