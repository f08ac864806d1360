"""Sets and lists prices.

A price takes effect some seconds after it is set, so every server knows it by then: all servers
charge a request by the price that was in effect when it was admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timedelta

from sqlalchemy import func, select

from ..base import utc_now
from ..errors import InvalidValue
from ..locked_rows import lock_or_add
from ..sessions import PlatformSession
from .book import PriceBook
from .models import CURRENCY_LENGTH, MAX_BASE_LENGTH, Currency, PriceRow
from .money import format_money
from .price import MAX_PRICE, Price

LEAD = timedelta(seconds=30)
"""From the setting of a price to its effect, at least."""
_CURRENCY_ID = 1


def set_price(
    session: PlatformSession,
    *,
    base: str,
    tenant_id: str | None,
    currency: str,
    prompt: int,
    cached: int,
    completion: int,
    batch_discount: int,
    effective_from: datetime | None = None,
    now: datetime | None = None,
) -> PriceRow:
    """Add a price, which supersedes the earlier one from that time on; None: as soon as possible.

    The prices are those of a million tokens, in 1e-9 of the currency's unit. Raises InvalidValue,
    also for a time before `now` and the lead, or for another currency than that of the other
    prices.
    """
    _check_base(base)
    _check_currency(currency)
    _check_amounts(prompt, cached, completion, batch_discount)
    found = lock_or_add(session, Currency(id=_CURRENCY_ID, code=currency))
    if found.code != currency:
        raise InvalidValue(f"All prices are in {found.code}.", param="currency")
    row = PriceRow(
        base=base,
        tenant_id=tenant_id,
        prompt=prompt,
        cached=cached,
        completion=completion,
        batch_discount=batch_discount,
        effective_from=_check_begin(effective_from, (now or utc_now()) + LEAD),
    )
    session.add(row)
    session.flush()
    return row


def list_prices(
    session: PlatformSession, *, after: int = 0, limit: int | None = None
) -> Sequence[PriceRow]:
    """All prices, past ones too, in the order in which they were set."""
    query = select(PriceRow).where(PriceRow.id > after).order_by(PriceRow.id)
    return session.scalars(query.limit(limit)).all()


def find_currency(session: PlatformSession) -> str | None:
    """The currency of all prices; None: there are none."""
    return session.scalar(select(Currency.code))


def read_book(session: PlatformSession, known: PriceBook) -> PriceBook:
    """The present prices; `known` itself if none was added since it was read."""
    if (session.scalar(select(func.max(PriceRow.id))) or 0) == known.last_id:
        return known
    return PriceBook(map(_price, list_prices(session)), find_currency(session))


def _price(row: PriceRow) -> Price:
    return Price(**{field.name: getattr(row, field.name) for field in fields(Price)})


def _check_begin(wanted: datetime | None, earliest: datetime) -> datetime:
    if wanted is None:
        return earliest
    if wanted < earliest:
        raise InvalidValue(
            f"A price takes effect {LEAD.seconds} s after it is set at the earliest, so that all "
            "servers know it.",
            param="effective_from",
        )
    return wanted


def _check_base(base: str) -> None:
    if not 1 <= len(base) <= MAX_BASE_LENGTH:
        raise InvalidValue(f"A base's name has 1 to {MAX_BASE_LENGTH} characters.", param="base")


def _check_currency(code: str) -> None:
    if len(code) != CURRENCY_LENGTH or not (code.isascii() and code.isalpha() and code.isupper()):
        raise InvalidValue(
            "A currency is a code of three capital letters, such as EUR.", param="currency"
        )


def _check_amounts(prompt: int, cached: int, completion: int, batch_discount: int) -> None:
    amounts = {"prompt": prompt, "cached": cached, "completion": completion}
    for name, amount in amounts.items():
        if not 0 <= amount <= MAX_PRICE:
            raise InvalidValue(f"{name} must be from 0 to {format_money(MAX_PRICE)}.", param=name)
    if cached > prompt:
        raise InvalidValue(
            "Cached prompt tokens cannot cost more than other prompt tokens.", param="cached"
        )
    if not 0 <= batch_discount <= 100:
        raise InvalidValue("A discount is from 0 to 100 percent.", param="batch_discount")
