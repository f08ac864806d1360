"""Requests that end during a transaction are written together, and each gets its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.inference import ledger_writer
from loraplex.api.inference.ledger_writer import MAX_REQUESTS, Charge, LedgerWriter, Owner
from loraplex.api.inference.pricing import Pricing
from loraplex.api.inference.used import Used
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable, TooManyRequestsAtOnce
from loraplex.platform.models import Reservation, UsageDay, UsageRecord
from loraplex.platform.prices.cost_rates import CostRates
from loraplex.platform.quotas.models import RateKind
from loraplex.platform.sessions import TenantStatements
from support.catalog import make_tenant
from support.databases import copy_of_migrated_sqlite
from support.limits import SERVER_ID, limit, make_demand
from support.money import UNIT, set_price
from support.server import server_settings


class Counting(ControlPlane):
    """Counts the transactions, and lets a test break them."""

    num_writes = 0
    is_away = False

    async def write_plain(self, tenant_id: str, change: Callable[[TenantStatements], Any]) -> Any:
        self.num_writes += 1
        if self.is_away:
            raise DatabaseUnavailable
        return await super().write_plain(tenant_id, change)


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[Counting]:
    settings = server_settings(tmp_path)
    if settings.is_database_embedded:
        copy_of_migrated_sqlite(tmp_path)
    opened = Counting(Database(settings.database_url), b"secret" * 8)
    yield opened
    opened.close()


@pytest.fixture
def tenant_ids(control_plane: Counting) -> list[str]:
    return [make_tenant(control_plane._database, slug).id for slug in ("acme", "bolt")]


def owner(tenant_id: str, request_id: str, **changes: Any) -> Owner:
    fields = {"key_id": None, "adapter_name": None, "adapter_version": None, "adapter_digest": None}
    return Owner(request_id=request_id, tenant_id=tenant_id, **{**fields, **changes})


def charge(completion_tokens: int = 3, *, cached_tokens: int = 1) -> Charge:
    return Charge(2, cached_tokens, completion_tokens, None, None, "stop", utc_now())


def sums(control_plane: Counting, tenant_id: str) -> tuple[int, int, int]:
    """Rows of the ledger, and requests and generated tokens of its days."""
    with control_plane._database.transaction(tenant_id, read_only=True) as session:
        num_rows = session.scalar(select(func.count(UsageRecord.request_id)))
        query = select(func.sum(UsageDay.num_requests), func.sum(UsageDay.completion_tokens))
        num_requests, num_tokens = session.execute(query).one()
    return num_rows or 0, num_requests or 0, num_tokens or 0


def reserved(control_plane: Counting, tenant_id: str) -> set[str]:
    """The requests that have reserved something."""
    with control_plane._database.transaction(tenant_id, read_only=True) as session:
        return set(session.scalars(select(Reservation.request_id)))


def test_what_ends_together_shares_transactions_and_loses_nothing(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    num_requests = 2 * MAX_REQUESTS

    async def scenario() -> list[bool]:
        writer = LedgerWriter(control_plane)
        ends = [
            writer.write(owner(tenant_id, f"{tenant_id}-{number}"), charge(number))
            for tenant_id in tenant_ids
            for number in range(num_requests)
        ]
        return await asyncio.gather(*ends)

    assert all(asyncio.run(scenario()))
    expected = (num_requests, num_requests, sum(range(num_requests)))
    assert [sums(control_plane, tenant_id) for tenant_id in tenant_ids] == [expected] * 2
    assert control_plane.num_writes <= 2 * 3, "one alone, and the others in full transactions"


def test_a_tenant_keeps_its_pace_and_who_is_alone_waits_for_nobody(
    control_plane: Counting, tenant_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, bolt = tenant_ids

    async def scenario() -> None:
        writer = LedgerWriter(control_plane)
        monkeypatch.setattr(ledger_writer, "PACE_SECONDS", 3600.0)
        await writer.write(owner(acme, "alone"), charge())
        await writer.write(owner(bolt, "another's"), charge())
        assert control_plane.num_writes == 2
        waiting = asyncio.create_task(writer.write(owner(acme, "too early"), charge()))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        assert control_plane.num_writes == 2
        writer.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())


def test_who_comes_before_the_next_is_due_shares_it(
    control_plane: Counting, tenant_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        writer = LedgerWriter(control_plane)
        monkeypatch.setattr(ledger_writer, "PACE_SECONDS", 0.5)
        await writer.write(owner(tenant_ids[0], "first"), charge())
        ends = []
        for number in range(5):
            ends.append(
                asyncio.create_task(writer.write(owner(tenant_ids[0], str(number)), charge()))
            )
            await asyncio.sleep(0.01)
        assert all(await asyncio.gather(*ends))

    asyncio.run(scenario())
    assert control_plane.num_writes == 2


def test_each_is_told_whether_its_own_row_is_new(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    acme = tenant_ids[0]

    async def scenario() -> list[bool]:
        writer = LedgerWriter(control_plane)
        assert await writer.write(owner(acme, "a"), charge())
        names = ("a", "b", "b", "c")
        free = Charge(0, 0, 0, None, None, "aborted", utc_now())
        ends = [writer.write(owner(acme, name), charge()) for name in names]
        return await asyncio.gather(*ends, writer.write(owner(acme, "d"), free))

    assert asyncio.run(scenario()) == [False, True, False, True, False]
    assert sums(control_plane, acme) == (3, 3, 9)


def test_a_row_keeps_its_owner_and_the_time_at_which_its_request_ended(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    acme = tenant_ids[0]
    yesterday = utc_now() - timedelta(days=1)
    ended = Charge(9, 4, 3, "host", 2.5, "length", yesterday)
    of_bot = owner(
        acme,
        "a",
        key_id="key",
        user_id="user",
        adapter_name="bot",
        adapter_version=3,
        adapter_digest="sha256:1",
    )

    async def scenario() -> None:
        assert await LedgerWriter(control_plane).write(of_bot, ended)

    asyncio.run(scenario())
    with control_plane._database.transaction(acme, read_only=True) as session:
        row = session.scalars(select(UsageRecord)).one()
        day = session.scalars(select(UsageDay.day)).one()
    names = set(Owner.__struct_fields__) - {"is_held", "admitted_at"}  # which are for the journal
    assert Owner(**{name: getattr(row, name) for name in names}) == of_bot
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (9, 4, 3)
    assert (row.tier, row.load_ms, row.finish_reason) == ("host", 2.5, "length")
    assert (row.created_at, day) == (yesterday, yesterday.date())


def test_a_row_has_what_its_request_has_used_and_what_that_costs(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    rates = CostRates(per_step_hour=36 * 10**8, per_kv_gib_hour=0, per_loaded_gib=10**9)
    used = Used(2_000_000_000, 5 * 2**40, 2**29, 7)
    ended = msgspec.structs.replace(charge(), used=used)

    async def scenario() -> None:
        writer = LedgerWriter(control_plane, rates=rates)
        assert await writer.write(owner(tenant_ids[0], "a"), ended)

    asyncio.run(scenario())
    with control_plane._database.transaction(tenant_ids[0], read_only=True) as session:
        row = session.scalars(select(UsageRecord)).one()
    assert [getattr(row, name) for name in Used.__struct_fields__] == [*msgspec.to_builtins(used)]
    assert row.cost == 2 * 10**6 + 5 * 10**8, "2 s of steps and half a GiB"


def test_a_row_that_cannot_be_written_keeps_no_other_from_being_so(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    acme = tenant_ids[0]

    async def scenario() -> list[Any]:
        writer = LedgerWriter(control_plane)
        charges = [charge(), charge(), charge(cached_tokens=9), charge()]
        ends = [writer.write(owner(acme, f"{i}"), each) for i, each in enumerate(charges)]
        return await asyncio.gather(*ends, return_exceptions=True)

    first, second, third, fourth = asyncio.run(scenario())
    assert (first, second, fourth) == (True, True, True)
    assert isinstance(third, Exception)
    assert sums(control_plane, acme) == (3, 3, 9)


def test_all_who_wait_hear_that_the_database_is_away_and_may_try_again(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    acme = tenant_ids[0]

    async def scenario() -> None:
        writer = LedgerWriter(control_plane)
        control_plane.is_away = True
        ends = [writer.write(owner(acme, f"{i}"), charge()) for i in range(3)]
        told = await asyncio.gather(*ends, return_exceptions=True)
        assert all(isinstance(each, DatabaseUnavailable) for each in told)
        control_plane.is_away = False
        assert await writer.write(owner(acme, "0"), charge())

    asyncio.run(scenario())
    assert sums(control_plane, acme) == (1, 1, 3)


def test_those_who_begin_share_transactions_with_those_who_end(
    control_plane: Counting, tenant_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = tenant_ids[0]
    monkeypatch.setattr(ledger_writer, "PACE_SECONDS", 0.05)
    limit(control_plane._database, acme, concurrent_requests=2, requests_per_minute=100)

    async def scenario() -> list[Any]:
        writer = LedgerWriter(control_plane)
        for name in "ab":
            await writer.reserve(acme, make_demand(name), SERVER_ID)
        control_plane.num_writes = 0
        ending = asyncio.create_task(writer.write(owner(acme, "a"), charge()))
        begun = [writer.reserve(acme, make_demand(name), SERVER_ID) for name in "cd"]
        return await asyncio.gather(ending, *begun, return_exceptions=True)

    is_new, standing, refusal = asyncio.run(scenario())
    assert is_new
    assert standing[RateKind.REQUESTS].remaining == 97
    assert isinstance(refusal, TooManyRequestsAtOnce)
    assert refusal.standing == standing
    assert control_plane.num_writes == 1
    assert reserved(control_plane, acme) == {"b", "c"}
    assert sums(control_plane, acme) == (1, 1, 3)


def test_a_request_that_used_nothing_gives_its_reservation_back_and_gets_no_row(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    acme = tenant_ids[0]
    limit(control_plane._database, acme, concurrent_requests=1)
    nothing = Charge(0, 0, 0, None, None, "aborted", utc_now())

    async def scenario() -> None:
        writer = LedgerWriter(control_plane)
        await writer.reserve(acme, make_demand("a"), SERVER_ID)
        assert not await writer.write(owner(acme, "a"), nothing)
        await writer.reserve(acme, make_demand("b"), SERVER_ID)

    asyncio.run(scenario())
    assert reserved(control_plane, acme) == {"b"}
    assert sums(control_plane, acme) == (0, 0, 0)


def test_one_that_cannot_be_reserved_keeps_no_other_from_being_so(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    acme = tenant_ids[0]
    limit(control_plane._database, acme, concurrent_requests=10)

    async def scenario() -> list[Any]:
        writer = LedgerWriter(control_plane)
        names = ("a", "b", "b", "c")
        ends = [writer.reserve(acme, make_demand(name), SERVER_ID) for name in names]
        return await asyncio.gather(*ends, return_exceptions=True)

    first, second, third, fourth = asyncio.run(scenario())
    assert first == second == fourth == {}
    assert isinstance(third, Exception)
    assert reserved(control_plane, acme) == {"a", "b", "c"}


def test_who_waits_when_it_is_closed_is_cancelled(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    async def scenario() -> None:
        writer = LedgerWriter(control_plane)
        ends = [
            asyncio.create_task(writer.write(owner(tenant_ids[0], f"{i}"), charge()))
            for i in range(3)
        ]
        await asyncio.sleep(0)
        writer.close()
        told = await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), 30)
        assert all(isinstance(each, asyncio.CancelledError) for each in told)

    asyncio.run(scenario())


def test_who_waits_to_be_tried_alone_is_cancelled_too(
    control_plane: Counting, tenant_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        is_trying = asyncio.Event()
        num_tries = 0

        async def fail_then_hang(*_: object) -> None:
            nonlocal num_tries
            num_tries += 1
            if num_tries == 1:
                raise ValueError("planted")
            is_trying.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(control_plane, "write_plain", fail_then_hang)
        writer = LedgerWriter(control_plane)
        begun = [writer.reserve(tenant_ids[0], make_demand(name), SERVER_ID) for name in "abc"]
        await is_trying.wait()
        writer.close()
        done, waiting = await asyncio.wait(begun, timeout=5)
        assert not waiting
        assert all(each.cancelled() for each in done)

    asyncio.run(scenario())


def test_a_request_is_charged_by_the_price_at_its_admission_and_a_batch_with_its_discount(
    control_plane: Counting, tenant_ids: list[str]
) -> None:
    acme, now = tenant_ids[0], utc_now()
    database = control_plane._database
    early = set_price(database, since=now - timedelta(hours=2))
    late = set_price(database, since=now - timedelta(hours=1), completion=4 * UNIT)
    before, after = now - timedelta(minutes=61), now - timedelta(minutes=59)
    owners = [
        owner(acme, "before", admitted_at=before),
        owner(acme, "after", admitted_at=after),
        owner(acme, "batch", admitted_at=before, is_held=True),
        owner(acme, "unknown"),  # of a journal that an earlier release has written
    ]

    async def scenario() -> None:
        writer = LedgerWriter(control_plane, pricing=Pricing(control_plane, "tiny"))
        await asyncio.gather(*(writer.write(each, charge()) for each in owners))

    asyncio.run(scenario())
    with database.transaction(acme, read_only=True) as session:
        rows = {row.request_id: row for row in session.scalars(select(UsageRecord))}
        day = session.scalars(select(func.sum(UsageDay.amount))).one()
    # A prompt of two tokens, one of them cached, and three completion tokens.
    assert {name: row.amount for name, row in rows.items()} == {
        "before": 1000 + 250 + 3 * 2000,
        "after": 1000 + 250 + 3 * 4000,
        "batch": (1000 + 250 + 3 * 2000) // 2,
        "unknown": 1000 + 250 + 3 * 4000,
    }
    assert {name: row.price_id for name, row in rows.items()} == {
        "before": early.id,
        "after": late.id,
        "batch": early.id,
        "unknown": late.id,
    }
    assert day == sum(row.amount for row in rows.values())
