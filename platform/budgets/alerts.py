"""Announces alerts of budgets, each once."""

from __future__ import annotations

from ..audit.event import Event
from ..base import utc_now
from ..prices.money import format_money
from ..sessions import TenantSession
from ..webhooks.event_types import EventType
from ..webhooks.outbox import announce
from . import repository
from .models import BudgetAlert


def announce_next(session: TenantSession) -> Event | None:
    """Announce the tenant's oldest alert that was not announced; None if there is none.

    The caller enters the event in the audit log in the same unit of work.
    """
    alert = repository.lock_next_alert(session)
    return None if alert is None else _announce(session, alert)


def _announce(session: TenantSession, alert: BudgetAlert) -> Event:
    """Everything that is told of the alert, in the unit of work that marks it as announced."""
    alert.announced_at = utc_now()
    details = {
        "percent": alert.percent,
        "period": str(alert.period),
        "period_begins_at": alert.begins_at.isoformat(),
        "budget": format_money(alert.budget),
        "spent": format_money(alert.spent),
    }
    data = {"holder": alert.holder, **details}
    announce(session, session.tenant_id, EventType.BUDGET_ALERT, data)
    return Event("budget.alert", alert.holder, details)
