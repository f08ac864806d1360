"""Prices and budgets in tests."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from loraplex.platform.base import utc_now
from loraplex.platform.budgets import service as budgets
from loraplex.platform.database import Database
from loraplex.platform.prices import service as prices
from loraplex.platform.prices.models import PriceRow
from loraplex.platform.quotas.holder import TENANT, Holder
from loraplex.platform.quotas.models import Period

UNIT = 10**9
"""One unit of the currency."""


def set_price(
    database: Database, base: str = "tiny", *, since: datetime | None = None, **changes: Any
) -> PriceRow:
    """Prices of 1, 0.25 and 2 units for a million prompt, cached and completion tokens, in effect
    since that time: without one, since an hour ago."""
    begin = since or utc_now() - timedelta(hours=1)
    fields: dict[str, Any] = {
        "tenant_id": None,
        "currency": "EUR",
        "prompt": UNIT,
        "cached": UNIT // 4,
        "completion": 2 * UNIT,
        "batch_discount": 50,
    }
    with database.platform_transaction() as session:
        return prices.set_price(
            session,
            base=base,
            effective_from=begin,
            now=begin - prices.LEAD,
            **{**fields, **changes},
        )


def set_budget(
    database: Database,
    tenant_id: str,
    amount: int,
    *,
    holder: Holder = TENANT,
    period: Period = Period.MONTH,
    alerts: tuple[int, ...] = (),
) -> None:
    """Give the holder a budget, by default the tenant."""
    with database.transaction(tenant_id) as session:
        budgets.set_budget(session, holder, period, amount, alerts)
