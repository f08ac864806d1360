"""The tables of prices and of the currency."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, false, text
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, UtcDateTime, utc_now

MAX_BASE_LENGTH = 255
CURRENCY_LENGTH = 3


class Currency(Base):
    """The currency of all amounts of the deployment: one row, that the first price makes.

    It is locked while a price is set, so prices are committed in the order of their ids.
    """

    __tablename__ = "currency"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    code: Mapped[str] = mapped_column(String(CURRENCY_LENGTH))


class PriceRow(Base):
    """The prices of one base model from a time on. Never changed or removed: a later one supersedes
    it.

    Tenants cannot read the table, because it has the prices that others negotiated.
    """

    __tablename__ = "prices"
    __table_args__ = (
        CheckConstraint(
            "prompt >= 0 AND cached >= 0 AND cached <= prompt AND completion >= 0", name="amounts"
        ),
        Index("ix_prices_base_effective_from", "base", "effective_from"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    base: Mapped[str] = mapped_column(String(MAX_BASE_LENGTH))
    """The base's name, as servers serve it."""
    tenant_id: Mapped[str | None] = mapped_column(String(ID_LENGTH), ForeignKey("tenants.id"))
    """The only tenant it is for; None: all tenants without prices of their own."""
    prompt: Mapped[int] = mapped_column(BigInteger)
    """Of a million prompt tokens that the prefix cache did not hold; 1e-9 of the currency's unit,
    as the two below."""
    cached: Mapped[int] = mapped_column(BigInteger)
    """Of a million prompt tokens that the prefix cache held."""
    completion: Mapped[int] = mapped_column(BigInteger)
    trained: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))
    """Of a million tokens that fine-tuning jobs train on."""
    batch_discount: Mapped[int]
    """In percent, on requests of batches."""
    is_end: Mapped[bool] = mapped_column(default=False, server_default=false())
    """It only ends the tenant's own prices: from then on those of all tenants hold."""
    effective_from: Mapped[datetime] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
