"""Prices: exact amounts, and which price is in effect when."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_HALF_UP, Decimal
from typing import Any

import pytest

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue, PriceNotFound
from loraplex.platform.prices import service
from loraplex.platform.prices.book import NO_BOOK
from loraplex.platform.prices.money import MAX_AMOUNT, NANOS, format_money, parse_money
from loraplex.platform.prices.price import Price, amount_of_training
from loraplex.platform.prices.service import LEAD, ListedPrice, read_book
from loraplex.platform.tenants.models import Tenant
from support.money import UNIT, set_price

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def make_price(**changes: int) -> Price:
    fields: dict[str, Any] = {
        "prompt": UNIT,
        "cached": UNIT // 4,
        "completion": 2 * UNIT,
        "batch_discount": 0,
    }
    return Price(id=1, base="tiny", tenant_id=None, effective_from=NOON, **{**fields, **changes})


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("0.15", 150_000_000),
        ("12.5", 12_500_000_000),
        ("0.000000001", 1),
        ("1000000000", MAX_AMOUNT),
        ("007", 7 * NANOS),
    ],
)
def test_reads_decimal_strings_exactly(text: str, amount: int) -> None:
    assert parse_money(text, param="amount") == amount
    assert Decimal(format_money(amount)) == Decimal(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "-1", "+1", "1e3", "1,5", " 1", "1.", ".5", "NaN", "٣", "1_0"),
        *("0.0000000001", "1000000000.000000001", "1" * 30),
    ],
)
def test_refuses_what_is_no_amount(text: str) -> None:
    with pytest.raises(InvalidValue, match="decimal string"):
        parse_money(text, param="amount")


def test_shows_at_least_two_decimals_and_no_needless_ones() -> None:
    amounts = [0, NANOS // 2, 12 * NANOS + 345_600_000, 1]
    assert list(map(format_money, amounts)) == ["0.00", "0.50", "12.3456", "0.000000001"]


def test_amounts_are_those_of_decimal_arithmetic() -> None:
    draw = random.Random(7)
    for _ in range(2000):
        cached_price, prompt_price = sorted(
            draw.randrange(10 ** draw.randrange(1, 12)) for _ in "12"
        )
        price = make_price(
            prompt=prompt_price,
            cached=cached_price,
            completion=draw.randrange(10**12),
            batch_discount=draw.randrange(101),
        )
        prompt = draw.randrange(200_000)
        cached, completion = draw.randint(0, prompt), draw.randrange(100_000)
        is_batch = draw.random() < 0.5
        exact = Decimal((prompt - cached) * price.prompt + cached * price.cached)
        exact = (exact + completion * price.completion) / 1_000_000
        if is_batch:
            exact = exact * (100 - price.batch_discount) / 100
        amount = price.amount(
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            is_batch=is_batch,
        )
        assert amount == exact.quantize(Decimal(1), ROUND_HALF_UP)
        most = price.most(prompt_tokens=prompt, completion_tokens=completion, is_batch=is_batch)
        assert most >= amount
        if not cached:
            assert most == exact.quantize(Decimal(1), ROUND_CEILING)


def test_the_amount_of_training_is_that_of_decimal_arithmetic() -> None:
    draw = random.Random(8)
    for _ in range(2000):
        price, num_tokens = draw.randrange(10**12), draw.randrange(10 ** draw.randrange(1, 10))
        exact = Decimal(price * num_tokens) / 1_000_000
        most = Decimal(MAX_AMOUNT)
        assert amount_of_training(price, num_tokens) == min(
            exact.quantize(Decimal(1), ROUND_HALF_UP), most
        )


def test_the_latest_price_in_effect_is_found_and_a_tenants_own_comes_first(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    first = set_price(database, since=NOON)
    second = set_price(database, since=NOON + HOUR, prompt=3 * UNIT)
    own = set_price(database, since=NOON + 2 * HOUR, tenant_id=acme.id)
    other = set_price(database, "other", since=NOON)
    with database.platform_transaction(read_only=True) as session:
        book = read_book(session, NO_BOOK)
        assert read_book(session, book) is book, "it is read again only if prices were added"
    of_acme, of_bolt = (book.tariff("tiny", tenant.id) for tenant in (acme, bolt))

    def found(hours: float) -> list[int | None]:
        moment = NOON + hours * HOUR
        prices = (of_acme.at(moment), of_bolt.at(moment))
        return [None if price is None else price.id for price in prices]

    assert found(-0.001) == [None, None]
    assert found(0) == found(0.999) == [first.id, first.id]
    assert found(1) == [second.id, second.id]
    assert found(2) == [own.id, second.id]
    assert (price := book.tariff("other", acme.id).at(NOON))
    assert price.id == other.id
    assert book.currency == "EUR"


def test_of_prices_from_the_same_time_the_one_that_was_set_last_holds(database: Database) -> None:
    set_price(database, since=NOON)
    corrected = set_price(database, since=NOON, prompt=5 * UNIT)
    with database.platform_transaction(read_only=True) as session:
        price = read_book(session, NO_BOOK).tariff("tiny", "tenant").at(NOON)
    assert price
    assert price.id == corrected.id


def test_a_tenant_whose_own_price_ended_pays_the_price_of_all_until_it_has_one_again(
    database: Database, acme: Tenant
) -> None:
    common = set_price(database, since=NOON)
    own = set_price(database, since=NOON + HOUR, tenant_id=acme.id)
    again = set_price(database, since=NOON + 4 * HOUR, tenant_id=acme.id)
    ended = end_price(database, acme.id, NOON + 2 * HOUR)
    assert (ended.row.id, ended.effective_until) == (own.id, NOON + 2 * HOUR)
    with database.platform_transaction(read_only=True) as session:
        tariff = read_book(session, NO_BOOK).tariff("tiny", acme.id)
    found = [price and price.id for hours in range(6) if (price := tariff.at(NOON + hours * HOUR))]
    assert found == [common.id, own.id, common.id, common.id, again.id, again.id]


def test_a_tenant_whose_only_price_ended_pays_nothing(database: Database, acme: Tenant) -> None:
    set_price(database, since=NOON, tenant_id=acme.id)
    end_price(database, acme.id, NOON + HOUR)
    with database.platform_transaction(read_only=True) as session:
        tariff = read_book(session, NO_BOOK).tariff("tiny", acme.id)
    assert tariff.at(NOON)
    assert tariff.at(NOON + HOUR) is None


def test_only_a_price_that_a_tenant_has_then_can_be_ended(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with pytest.raises(PriceNotFound):
        end_price(database, acme.id, NOON)
    set_price(database, since=NOON)
    set_price(database, since=NOON + HOUR, tenant_id=acme.id)
    for tenant, moment in ((acme, NOON), (bolt, NOON + HOUR)):
        with pytest.raises(PriceNotFound):
            end_price(database, tenant.id, moment)
    end_price(database, acme.id, NOON + HOUR)
    with pytest.raises(PriceNotFound):
        end_price(database, acme.id, NOON + 2 * HOUR)
    with database.platform_transaction() as session, pytest.raises(InvalidValue, match="30 s"):
        service.end_own_price(session, base="tiny", tenant_id=acme.id, effective_from=utc_now())


def test_a_list_says_until_when_each_price_holds(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    """Compared with the times at which the book changes its answer."""
    draw = random.Random(3)
    owners = (None, acme.id, bolt.id)
    for _ in range(60):
        owner, begin = draw.choice(owners), NOON + draw.randrange(20) * HOUR
        if owner is None or draw.random() < 0.7:
            set_price(database, since=begin, tenant_id=owner)
        else:
            try:
                end_price(database, owner, begin)
            except PriceNotFound:
                continue
    with database.platform_transaction(read_only=True) as session:
        prices, book = service.list_prices(session), read_book(session, NO_BOOK)
        hours = [NOON + hour * HOUR for hour in range(21)]
        for price in prices:
            begin, until = price.row.effective_from, price.effective_until
            tariff = book.tariff("tiny", price.row.tenant_id or "somebody else")
            for hour in hours:
                found = tariff.at(hour)
                holds = begin <= hour and (until is None or hour < until)
                assert (found is not None and found.id == price.row.id) == holds
        moment = NOON + 10 * HOUR
        current = service.list_prices(session, current_at=moment)
        own = service.list_prices(session, own=True)
        of_acme = service.list_prices(session, tenant_id=acme.id)
        rest = service.list_prices(session, own=False)
    assert [price.row.id for price in current] == [
        price.row.id
        for price in prices
        if price.effective_until is None
        or (price.effective_until > moment and price.effective_until != price.row.effective_from)
    ]
    assert {price.row.tenant_id for price in own} == {acme.id, bolt.id}
    assert {price.row.tenant_id for price in of_acme} == {acme.id}
    assert len(own) + len(rest) == len(prices)


def test_a_price_takes_effect_only_when_every_server_knows_it(database: Database) -> None:
    now = utc_now()
    with database.platform_transaction() as session:
        row = service.set_price(
            session,
            base="tiny",
            tenant_id=None,
            currency="EUR",
            prompt=1,
            cached=1,
            completion=1,
            batch_discount=0,
            now=now,
        )
        assert row.effective_from == now + LEAD
    with pytest.raises(InvalidValue, match="30 s"):
        set_price_now(database, now, effective_from=now + LEAD - timedelta(seconds=1))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"base": ""}, "base"),
        ({"currency": "eur"}, "currency"),
        ({"currency": "EURO"}, "currency"),
        ({"currency": "USD"}, "currency"),
        ({"prompt": -1, "cached": -1}, "prompt"),
        ({"cached": UNIT + 1}, "cached"),
        ({"completion": 10**16}, "completion"),
        ({"trained": -1}, "trained"),
        ({"batch_discount": 101}, "batch_discount"),
    ],
)
def test_refuses_what_is_no_price(
    database: Database, changes: dict[str, object], param: str
) -> None:
    set_price(database)
    with pytest.raises(InvalidValue) as refused:
        set_price_now(database, utc_now(), **changes)
    assert refused.value.param == param


def set_price_now(database: Database, now: datetime, **changes: object) -> None:
    fields: dict[str, object] = {
        "base": "tiny",
        "tenant_id": None,
        "currency": "EUR",
        "prompt": UNIT,
        "cached": UNIT,
        "completion": UNIT,
        "batch_discount": 0,
        "now": now,
    }
    with database.platform_transaction() as session:
        service.set_price(session, **{**fields, **changes})  # type: ignore[arg-type]


def end_price(database: Database, tenant_id: str, moment: datetime) -> ListedPrice:
    """End the tenant's own price then, set a minute before."""
    with database.platform_transaction() as session:
        return service.end_own_price(
            session,
            base="tiny",
            tenant_id=tenant_id,
            effective_from=moment,
            now=moment - timedelta(minutes=1),
        )
