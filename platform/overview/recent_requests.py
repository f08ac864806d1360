"""An adapter's request count of the last days, denormalized so that lists can be sorted by it.

The ledger's daily sums contain it exactly. Adding them up for all adapters would take most of a
second per list with thousands of adapters; for one adapter it takes one look-up per day.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Select, func, select

from ..base import utc_now
from ..sessions import PlatformSession
from ..usage.models import UsageDay
from .models import AdapterUse

COUNTED_DAYS = 30
"""Requests of today and of the days before it, this many days in total."""
_REQUESTS = func.sum(UsageDay.num_requests)


def count_requests(session: PlatformSession, tenant_id: str, adapter_name: str) -> int:
    """The adapter's requests of the counted days."""
    counted = _counted(tenant_id).where(UsageDay.adapter_name == adapter_name)
    return int(session.scalar(counted.with_only_columns(_REQUESTS)) or 0)


def users(session: PlatformSession) -> list[str]:
    """The ids of the tenants whose adapters were ever used."""
    return list(session.scalars(select(AdapterUse.tenant_id).distinct()))


def recount(session: PlatformSession, tenant_id: str) -> None:
    """Recount the tenant's adapters, because days also pass for unused adapters."""
    counted = _counted(tenant_id).group_by(UsageDay.adapter_name)
    requests = {name: int(number) for name, number in session.execute(counted)}
    uses = select(AdapterUse).where(AdapterUse.tenant_id == tenant_id)
    for use in session.scalars(uses.order_by(AdapterUse.adapter_name).with_for_update()):
        use.num_requests = requests.get(use.adapter_name, 0)


def _counted(tenant_id: str) -> Select[str, int]:
    first_day = utc_now().date() - timedelta(days=COUNTED_DAYS - 1)
    return select(UsageDay.adapter_name, _REQUESTS).where(
        UsageDay.tenant_id == tenant_id, UsageDay.day >= first_day
    )
