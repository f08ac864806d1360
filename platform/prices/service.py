"""Sets, ends and lists prices.

A price takes effect some seconds after it is set, so every server knows it by then: all servers
charge a request by the price that was in effect when it was admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import aliased

from ..base import UtcDateTime, utc_now
from ..errors import InvalidValue, PriceNotFound
from ..locked_rows import lock_or_add
from ..sessions import PlatformSession
from .book import PriceBook
from .models import CURRENCY_LENGTH, MAX_BASE_LENGTH, Currency, PriceRow
from .money import format_money
from .price import MAX_PRICE, Price

LEAD = timedelta(seconds=30)
"""From the setting of a price to its effect, at least."""
_CURRENCY_ID = 1


@dataclass(frozen=True, slots=True)
class ListedPrice:
    """A price and the time until which it holds."""

    row: PriceRow
    effective_until: datetime | None
    """When the next one of the same base and tenant begins, or the tenant's own prices end; None:
    neither is set."""


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
    trained: int = 0,
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
    _check_amounts(prompt, cached, completion, trained, batch_discount)
    found = lock_or_add(session, Currency(id=_CURRENCY_ID, code=currency))
    if found.code != currency:
        raise InvalidValue(f"All prices are in {found.code}.", param="currency")
    row = PriceRow(
        base=base,
        tenant_id=tenant_id,
        prompt=prompt,
        cached=cached,
        completion=completion,
        trained=trained,
        batch_discount=batch_discount,
        effective_from=_check_begin(effective_from, (now or utc_now()) + LEAD),
    )
    session.add(row)
    session.flush()
    return row


def end_own_price(
    session: PlatformSession,
    *,
    base: str,
    tenant_id: str,
    effective_from: datetime | None = None,
    now: datetime | None = None,
) -> ListedPrice:
    """End the tenant's own price of a base: from that time on, it pays those of all tenants.

    None: as soon as possible. Own prices that begin later still do. Returns the price that ends.
    Raises PriceNotFound if the tenant has no own price then, and InvalidValue for a time before
    `now` and the lead.
    """
    if session.get(Currency, _CURRENCY_ID, with_for_update=True) is None:
        raise PriceNotFound
    begin = _check_begin(effective_from, (now or utc_now()) + LEAD)
    held = session.scalar(
        select(PriceRow)
        .where(
            PriceRow.base == base,
            PriceRow.tenant_id == tenant_id,
            PriceRow.effective_from <= begin,
        )
        .order_by(PriceRow.effective_from.desc(), PriceRow.id.desc())
        .limit(1)
    )
    if held is None or held.is_end:
        raise PriceNotFound
    end = PriceRow(
        base=base,
        tenant_id=tenant_id,
        prompt=0,
        cached=0,
        completion=0,
        batch_discount=0,
        is_end=True,
        effective_from=begin,
    )
    session.add(end)
    session.flush()
    return ListedPrice(held, begin)


def list_prices(
    session: PlatformSession,
    *,
    after: int = 0,
    limit: int | None = None,
    base: str | None = None,
    tenant_id: str | None = None,
    own: bool | None = None,
    current_at: datetime | None = None,
) -> Sequence[ListedPrice]:
    """The prices in the order in which they were set.

    `own`: only those of single tenants, or only those of all tenants. `current_at`: only those that
    hold then or later.
    """
    begins_next = func.lead(PriceRow.effective_from, type_=UtcDateTime()).over(
        partition_by=(PriceRow.base, PriceRow.tenant_id),
        order_by=(PriceRow.effective_from, PriceRow.id),
    )
    timeline = select(PriceRow, begins_next.label("until")).subquery()
    price, until = aliased(PriceRow, timeline), timeline.c.until
    query = select(price, until).where(price.id > after, ~price.is_end)
    if base is not None:
        query = query.where(price.base == base)
    if tenant_id is not None:
        query = query.where(price.tenant_id == tenant_id)
    if own is not None:
        query = query.where(price.tenant_id.is_not(None) if own else price.tenant_id.is_(None))
    if current_at is not None:
        is_used = and_(until > current_at, until > price.effective_from)
        query = query.where(or_(until.is_(None), is_used))
    rows = session.execute(query.order_by(price.id).limit(limit))
    return [ListedPrice(row, ends_at) for row, ends_at in rows]


def find_currency(session: PlatformSession) -> str | None:
    """The currency of all prices; None: there are none."""
    return session.scalar(select(Currency.code))


def read_book(session: PlatformSession, known: PriceBook) -> PriceBook:
    """The present prices; `known` itself if none was added since it was read."""
    if (session.scalar(select(func.max(PriceRow.id))) or 0) == known.last_id:
        return known
    return PriceBook(map(_price, session.scalars(select(PriceRow))), find_currency(session))


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


def _check_amounts(
    prompt: int, cached: int, completion: int, trained: int, batch_discount: int
) -> None:
    amounts = {"prompt": prompt, "cached": cached, "completion": completion, "trained": trained}
    for name, amount in amounts.items():
        if not 0 <= amount <= MAX_PRICE:
            raise InvalidValue(f"{name} must be from 0 to {format_money(MAX_PRICE)}.", param=name)
    if cached > prompt:
        raise InvalidValue(
            "Cached prompt tokens cannot cost more than other prompt tokens.", param="cached"
        )
    if not 0 <= batch_discount <= 100:
        raise InvalidValue("A discount is from 0 to 100 percent.", param="batch_discount")
