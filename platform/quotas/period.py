"""The periods of token budgets, in UTC."""

from __future__ import annotations

from datetime import datetime, timedelta

from .models import Period


def begin_of(period: Period, moment: datetime) -> datetime:
    """The midnight at which the period of this moment began."""
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight if period is Period.DAY else midnight.replace(day=1)


def end_of(period: Period, begin: datetime) -> datetime:
    """The midnight at which the next one begins."""
    if period is Period.DAY:
        return begin + timedelta(days=1)
    return (begin + timedelta(days=31)).replace(day=1)
