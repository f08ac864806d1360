"""The tables of budgets, of what was spent of them, and of alerts."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, state_type, utc_now
from ..quotas.holder import MAX_HOLDER_LENGTH
from ..quotas.models import Period


class Budget(TenantOwned, Base):
    """What may be spent in each period. Amounts are in 1e-9 of the currency's unit."""

    __tablename__ = "budgets"
    __table_args__ = (CheckConstraint("amount >= 0", name="amount"),)

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    holder: Mapped[str] = mapped_column(String(MAX_HOLDER_LENGTH), primary_key=True)
    period: Mapped[Period] = mapped_column(state_type(Period, name="period"), primary_key=True)
    amount: Mapped[int] = mapped_column(BigInteger)
    alert_percents: Mapped[list[int]] = mapped_column(JSON)
    """Ascending: each makes one alert in a period when so much of the amount is spent."""
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, onupdate=utc_now)


class BudgetUse(TenantOwned, Base):
    """What the holder of a budget has spent in one period, according to the ledger."""

    __tablename__ = "budget_uses"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    holder: Mapped[str] = mapped_column(String(MAX_HOLDER_LENGTH), primary_key=True)
    period: Mapped[Period] = mapped_column(state_type(Period, name="period"), primary_key=True)
    begins_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    amount: Mapped[int] = mapped_column(BigInteger, default=0)


class BudgetAlert(TenantOwned, Base):
    """A budget of which so many percent were spent in a period. A changed amount alerts anew."""

    __tablename__ = "budget_alerts"
    __table_args__ = (Index("ix_budget_alerts_announced_at", "announced_at"),)

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    holder: Mapped[str] = mapped_column(String(MAX_HOLDER_LENGTH), primary_key=True)
    period: Mapped[Period] = mapped_column(state_type(Period, name="period"), primary_key=True)
    begins_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    percent: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    budget: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """The amount of the budget at that time."""
    spent: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    announced_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """When it was entered in the audit log; None: not yet."""
