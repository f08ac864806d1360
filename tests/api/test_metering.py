"""An account is settled exactly once, wherever its server dies and however long the outage is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.inference import metering
from loraplex.api.inference.generation import Outcome, TokenCounts
from loraplex.api.inference.ledger_writer import Charge, LedgerWriter
from loraplex.api.inference.metering import Account, Metering
from loraplex.api.inference.served_models import ServedModel
from loraplex.api.telemetry.metrics import Metrics
from loraplex.engine.errors import Overloaded, TenantQueueFull
from loraplex.engine.messages import FinishReason, RequestFinished, Resources
from loraplex.engine.process.request_end import RequestEnd, used_by
from loraplex.engine.token_journal import TokenJournal
from loraplex.platform.adapters.composition import Composition, ResolvedMember
from loraplex.platform.adapters.registry import AdapterRef
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable
from loraplex.platform.keys.principal import Actor, ActorKind, Principal, Scope
from loraplex.platform.models import Reservation, UsageRecord
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.service import Demand
from support.catalog import make_digest, make_tenant
from support.databases import copy_of_migrated_sqlite
from support.server import server_settings

NUM_SLOTS = 8
WHOLE = Outcome(TokenCounts(10, 4, 7), Tier.HOST, "stop", 2.5)
BROKEN = Outcome(TokenCounts(), None, "aborted")


class Killed(BaseException):
    """The process ends here."""


class Life:
    """One life of a server, with its journal."""

    def __init__(self, home: Path) -> None:
        self.database = Database(server_settings(home).database_url)
        self.control_plane = ControlPlane(self.database, b"secret" * 8)
        self.journal = TokenJournal(home / "journal", num_slots=NUM_SLOTS)
        self.metering = Metering(
            journal=self.journal,
            ledger=LedgerWriter(self.control_plane),
            metrics=Metrics(lambda: None),
        )
        self.ledger = self.metering._ledger

    def open(self, principal: Principal, request_id: str = "req-1", num_slots: int = 2) -> Account:
        """An account whose request is reserved, and of which 9 tokens are generated so far."""
        account = self.metering.open(
            request_id,
            principal,
            ServedModel(ADAPTER.pinned, ADAPTER),
            counts_prompt=[index == 0 for index in range(num_slots)],
        )
        demand = Demand(
            request_id=request_id, key_id=None, adapter=ADAPTER, input_tokens=10, output_tokens=20
        )
        with self.database.transaction(principal.tenant_id) as session:
            quotas.reserve(session, demand, server_id="here")
        for counter in account.counters:
            counter.start(num_prompt_tokens=10, num_cached_tokens=4)
        account.counters[0].generate(9)
        return account

    def die(self) -> None:
        """Nothing is written any more; what is in the file stays."""
        self.journal.close()
        self.control_plane.close()


BASE = ServedModel("base", None)
ADAPTER = AdapterRef(
    key=AdapterKey("tenant", make_digest("weights")),
    adapter_id="a",
    version_id="v",
    tenant_slug="acme",
    name="bot",
    version=3,
    state=VersionState.READY,
    base_id="base",
    object_sha256="",
    size_bytes=1,
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    if server_settings(tmp_path).is_database_embedded:
        copy_of_migrated_sqlite(tmp_path)
    return tmp_path


@pytest.fixture
def principal(home: Path) -> Iterator[Principal]:
    database = Database(server_settings(home).database_url)
    tenant = make_tenant(database, "acme")
    actor = Actor(ActorKind.KEY, "key", "key")
    yield Principal(
        tenant_id=tenant.id,
        tenant_slug="acme",
        actor=actor,
        scopes=frozenset(Scope),
        key_id="key-1",
    )
    database.close()


def rows(life: Life) -> list[tuple[object, ...]]:
    with life.database.platform_transaction(read_only=True) as session:
        found = session.scalars(select(UsageRecord)).all()
        assert session.scalars(select(Reservation)).all() == [], "all is settled"
    return [
        (r.request_id, r.prompt_tokens, r.cached_tokens, r.completion_tokens, r.finish_reason)
        for r in found
    ]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def dying(*_: object) -> None:
    raise Killed


CRASHES: dict[str, tuple[str, str, tuple[object, ...]]] = {
    # Where: what dies, and the row that the next life makes or finds.
    "before the outcome is written": ("journal", "close_request", ("req-1", 10, 4, 9, "aborted")),
    "before the commit": ("ledger", "write", ("req-1", 10, 4, 7, "stop")),
    "before the slots are freed": ("journal", "free", ("req-1", 10, 4, 7, "stop")),
}


@pytest.mark.parametrize("where", CRASHES)
def test_a_server_that_dies_on_the_way_leaves_one_row(
    home: Path, principal: Principal, where: str
) -> None:
    part, method, expected = CRASHES[where]

    async def first_life() -> None:
        life = Life(home)
        account = life.open(principal)
        with patch.object(getattr(life, part), method, dying), suppress(Killed):
            await life.metering._settle_whole(account, WHOLE)
            await asyncio.gather(*life.metering._tasks)
        life.die()

    async def second_life() -> None:
        life = Life(home)
        await life.metering.recover()
        await until(lambda: life.journal.num_free == NUM_SLOTS)
        assert rows(life) == [expected]
        await life.metering.close()
        life.die()

    run(first_life())
    run(second_life())
    run(second_life())


def test_while_the_database_is_away_outcomes_wait_on_the_disk(
    home: Path, principal: Principal
) -> None:
    async def outage() -> None:
        life = Life(home)
        await life.metering.recover()
        synced: list[object] = []
        accounts = [life.open(principal, name, 1) for name in ("a", "b", "c", "d")]
        life.control_plane.watch.is_away = True
        with patch.object(TokenJournal, "sync", lambda _, slots: synced.append(slots)):
            for account in accounts[:3]:
                await life.metering.settle(account, WHOLE)
        assert synced == [account.slots for account in accounts[:3]]
        assert life.metering.num_unsettled == 3
        with pytest.raises(DatabaseUnavailable):  # it holds as many slots as are left
            life.open(principal, "e")
        life.die()

    async def back() -> None:
        life = Life(home)
        life.control_plane.watch.is_away = True
        with patch.object(metering, "RETRY_SECONDS", 0.01):
            await life.metering.recover()
            assert life.metering.num_unsettled == 4
            await asyncio.sleep(0.05)
            assert life.metering.num_unsettled == 4
            life.control_plane.watch.is_away = False
            await until(lambda: life.journal.num_free == NUM_SLOTS)
        assert sorted(rows(life)) == [
            ("a", 10, 4, 7, "stop"),
            ("b", 10, 4, 7, "stop"),
            ("c", 10, 4, 7, "stop"),
            ("d", 10, 4, 9, "aborted"),
        ]
        await life.metering.close()
        life.die()

    run(outage())
    run(back())


def test_an_outcome_of_an_earlier_release_stays_as_it_is_until_its_row_is_written(
    home: Path, principal: Principal
) -> None:
    ended = Charge(10, 4, 7, None, None, "stop", utc_now())
    before_used_was_added = msgspec.json.decode(msgspec.json.encode(ended))[:-1]

    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)
        life.journal.close_request(account.slots, msgspec.msgpack.encode(before_used_was_added))
        life.die()
        written = (home / "journal").read_bytes()
        life = Life(home)
        life.control_plane.watch.is_away = True
        with patch.object(metering, "RETRY_SECONDS", 0.01):
            await life.metering.recover()
            assert life.metering.num_unsettled == 1
            assert (home / "journal").read_bytes() == written
            life.control_plane.watch.is_away = False
            await until(lambda: life.journal.num_free == NUM_SLOTS)
        assert rows(life) == [("req-1", 10, 4, 7, "stop")]
        await life.metering.close()
        life.die()

    run(scenario())


def test_a_commit_whose_answer_is_lost_is_not_repeated(home: Path, principal: Principal) -> None:
    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)
        commit = life.control_plane.write_plain

        async def commit_and_lose(*args: Any) -> None:
            await commit(*args)
            raise DatabaseUnavailable

        with patch.object(metering, "RETRY_SECONDS", 0.01):
            await life.metering.recover()
            with patch.object(life.control_plane, "write_plain", commit_and_lose):
                await life.metering.settle(account, WHOLE)
            await until(lambda: life.journal.num_free == NUM_SLOTS)
        assert rows(life) == [("req-1", 10, 4, 7, "stop")]
        await life.metering.close()
        life.die()

    run(scenario())


def test_an_answer_is_charged_though_its_caller_goes_away_meanwhile(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)
        write, may_write = life.ledger.write, asyncio.Event()

        async def write_late(*args: Any) -> bool:
            await may_write.wait()
            return await write(*args)

        with patch.object(life.ledger, "write", write_late):
            settling = asyncio.create_task(life.metering.settle(account, WHOLE))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            settling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await settling
            may_write.set()
            await until(lambda: life.journal.num_free == NUM_SLOTS)
        assert rows(life) == [("req-1", 10, 4, 7, "stop")]
        await life.metering.close()
        life.die()

    run(scenario())


def test_a_row_that_cannot_be_written_after_an_outage_holds_up_no_other(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        accounts = [life.open(principal, name, 1) for name in ("spoiled", "b")]
        write = life.ledger.write

        async def write_unless_spoiled(owner: Any, charge: Any) -> bool:
            if owner.request_id == "spoiled":
                raise ValueError("planted")
            return await write(owner, charge)

        life.control_plane.watch.is_away = True
        for account in accounts:
            await life.metering.settle(account, WHOLE)
        life.control_plane.watch.is_away = False
        with (
            patch.object(metering, "RETRY_SECONDS", 0.01),
            patch.object(life.ledger, "write", write_unless_spoiled),
            capture_logs() as logged,
        ):
            await life.metering.recover()
            await until(lambda: life.metering.num_unsettled == 0)
        assert [(each["event"], each["request_id"]) for each in logged] == [
            ("usage_not_recorded", "spoiled")
        ]
        await until(lambda: life.journal.num_free == NUM_SLOTS - 1)
        assert num_rows(life) == 1
        await life.metering.close()
        life.die()

    run(scenario())


def test_a_broken_answer_is_charged_by_what_was_received_of_each_sequence(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)
        account.counters[1].generate(5)
        await life.metering.settle(account, BROKEN)
        await until(lambda: life.journal.num_free == NUM_SLOTS)
        assert rows(life) == [("req-1", 10, 4, 14, "aborted")]
        await life.metering.close()
        life.die()

    run(scenario())


@pytest.mark.parametrize(
    "outcome", [WHOLE, Outcome(TokenCounts(), Tier.HOST, "aborted", 2.5)], ids=["whole", "broken"]
)
def test_a_row_tells_whose_request_it_was_and_counts_it_in_the_metrics(
    home: Path, principal: Principal, outcome: Outcome
) -> None:
    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)
        assert life.metering.is_open("req-1")
        assert not life.metering.is_open("req-2")
        with patch.object(life.metering._metrics.usage, "observe") as observe:
            await life.metering.settle(account, outcome)
            await until(lambda: life.journal.num_free == NUM_SLOTS)
        num_tokens = 7 if outcome is WHOLE else 9
        observe.assert_called_once_with("acme", prompt_tokens=10, completion_tokens=num_tokens)
        assert not life.metering.is_open("req-1")
        with life.database.platform_transaction(read_only=True) as session:
            (row,) = session.scalars(select(UsageRecord)).all()
        assert (row.tenant_id, row.key_id) == (principal.tenant_id, "key-1")
        assert (row.adapter_name, row.adapter_version) == ("bot", 3)
        assert row.adapter_digest == make_digest("weights")
        assert (row.tier, row.load_ms) == ("host", 2.5)
        await life.metering.close()
        life.die()

    run(scenario())


def test_what_was_counted_before_or_in_an_earlier_life_is_not_in_the_metrics(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        life.open(principal)
        life.die()
        life = Life(home)
        with patch.object(life.metering._metrics.usage, "observe") as observe:
            await life.metering.recover()
            await until(lambda: life.journal.num_free == NUM_SLOTS)
            again = life.metering.open("req-1", principal, BASE, **ONE_SEQUENCE)
            await life.metering.settle(again, WHOLE)
        assert num_rows(life) == 1
        observe.assert_not_called()
        await life.metering.close()
        life.die()

    run(scenario())


def test_a_broken_answer_that_cannot_be_written_is_noted_and_stays_in_the_journal(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)

        async def fail(*_: object) -> bool:
            raise ValueError("planted")

        with patch.object(life.ledger, "write", fail), capture_logs() as logged:
            await life.metering.settle(account, BROKEN)
            await until(lambda: not life.metering._tasks)
        assert [(each["event"], each["request_id"]) for each in logged] == [
            ("usage_not_recorded", "req-1")
        ]
        assert life.journal.num_free == NUM_SLOTS - 2
        await life.metering.close()
        life.die()

    run(scenario())


def test_a_stopping_server_waits_for_what_is_being_written_but_not_for_ever(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        write, may_write = life.ledger.write, asyncio.Event()

        async def write_late(*args: Any) -> bool:
            await may_write.wait()
            return await write(*args)

        with patch.object(life.ledger, "write", write_late):
            await life.metering.settle(life.open(principal, "a"), BROKEN)
            closing = asyncio.create_task(life.metering.close())
            await asyncio.sleep(0)
            may_write.set()
            await closing
        assert rows(life) == [("a", 10, 4, 9, "aborted")]
        life.die()

        life = Life(home)
        may_write.clear()
        with (
            patch.object(life.ledger, "write", write_late),
            patch.object(metering, "CLOSE_SECONDS", 0.01),
        ):
            await life.metering.settle(life.open(principal, "b"), BROKEN)
            (task,) = life.metering._tasks
            await life.metering.close()
            await asyncio.wait([task])
        assert task.cancelled()
        assert num_rows(life) == 1
        life.die()

    run(scenario())


def num_rows(life: Life) -> int:
    with life.database.platform_transaction(read_only=True) as session:
        return len(session.scalars(select(UsageRecord)).all())


def test_a_request_that_never_ran_costs_nothing_and_leaves_no_reservation(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)
        for counter in account.counters:
            counter.start(num_prompt_tokens=0, num_cached_tokens=0)
            counter.generate(0)
        await life.metering.settle(account, BROKEN)
        await until(lambda: life.journal.num_free == NUM_SLOTS)
        assert rows(life) == []
        life.metering.discard(life.metering.open("x", principal, BASE, **ONE_SEQUENCE))
        assert life.journal.num_free == NUM_SLOTS
        await life.metering.close()
        life.die()

    run(scenario())


ONE_SEQUENCE: dict[str, Any] = {"counts_prompt": [True]}


def test_a_tenant_that_asks_for_more_than_stays_free_is_refused_and_others_are_not(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        half = NUM_SLOTS // 2
        accounts = [
            life.metering.open(f"{number}", principal, BASE, **ONE_SEQUENCE)
            for number in range(half)
        ]
        with pytest.raises(TenantQueueFull):
            life.metering.open("x", principal, BASE, **ONE_SEQUENCE)
        other = replace(principal, tenant_id="other")
        with pytest.raises(Overloaded):  # too many at once for what is left
            life.metering.open("y", other, BASE, counts_prompt=[True] * 3)
        life.metering.open("y", other, BASE, **ONE_SEQUENCE)
        for account in accounts[:2]:
            life.metering.discard(account)
        life.metering.open("z", principal, BASE, **ONE_SEQUENCE)
        with pytest.raises(TenantQueueFull):
            life.metering.open("w", principal, BASE, **ONE_SEQUENCE)
        await life.metering.close()
        life.die()

    run(scenario())


def test_what_cannot_be_understood_keeps_no_server_from_starting(
    home: Path, principal: Principal
) -> None:
    async def scenario() -> None:
        life = Life(home)
        life.journal.open(b"\xc1 garbage", [True])
        life.open(principal)
        life.die()
        life = Life(home)
        await life.metering.recover()
        await until(lambda: life.journal.num_free == NUM_SLOTS - 1)
        assert rows(life) == [("req-1", 10, 4, 9, "aborted")]
        await life.metering.close()
        life.die()

    run(scenario())


@pytest.mark.parametrize("name", ["b", "b" * 64])
def test_a_compositions_row_names_all_adapters_unless_its_server_died_and_the_name_is_long(
    home: Path, principal: Principal, name: str
) -> None:
    async def scenario() -> None:
        first = replace(ADAPTER, name=name)
        second = replace(first, key=AdapterKey(ADAPTER.key.tenant_id, "sha256:" + "b" * 64))
        composition = Composition((ResolvedMember(first, 1.0), ResolvedMember(second, 0.5)))
        model = ServedModel(composition.pinned, first, composition=composition)
        life = Life(home)
        broken = life.metering.open("broken", principal, model, **ONE_SEQUENCE)
        broken.counters[0].start(num_prompt_tokens=10, num_cached_tokens=4)
        whole = life.metering.open("whole", principal, model, **ONE_SEQUENCE)
        await life.metering.settle(whole, WHOLE)
        life.die()
        later = Life(home)
        await later.metering.recover()
        with later.database.platform_transaction(read_only=True) as session:
            found = {row.request_id: row for row in session.scalars(select(UsageRecord))}
        for row in found.values():
            assert row.adapter_name == name
            assert row.adapter_digest == composition.key.digest
        assert found["whole"].composition == composition.pinned
        assert found["broken"].composition == (composition.pinned if len(name) == 1 else None)
        later.die()

    run(scenario())


# --- what requests have used ----------------------------------------------------------------------


def end_with(used: Resources | None) -> RequestEnd:
    """The end of a request; None: it is still to come."""
    end = RequestEnd()
    if used is not None:
        end.come(RequestFinished("r", FinishReason.STOP, 10, 7, used=used))
    return end


def settle_with(
    home: Path, principal: Principal, *ends: RequestEnd, late: Resources | None = None
) -> UsageRecord:
    """The row of a request with these ends; `late`: what comes for the last one meanwhile."""

    async def scenario() -> None:
        life = Life(home)
        account = life.open(principal)
        settling = asyncio.create_task(life.metering.settle(account, WHOLE._replace(ends=ends)))
        await asyncio.sleep(0.05)
        if late is not None:
            assert not settling.done()
            ends[-1].come(RequestFinished("r", FinishReason.ABORTED, 10, 7, used=late))
        await settling
        await life.metering.close()
        life.die()

    asyncio.run(scenario())
    database = Database(server_settings(home).database_url)
    with database.transaction(principal.tenant_id, read_only=True) as session:
        row = session.scalars(select(UsageRecord)).one()
        session.expunge_all()
    database.close()
    return row


def test_a_charge_has_what_all_choices_used_and_waits_for_one_that_was_cut_short(
    home: Path, principal: Principal
) -> None:
    early, late = Resources(1.5, 1000.4, 30, 20), Resources(0.25, 3.0, 5, 0)
    row = settle_with(home, principal, end_with(early), end_with(None), late=late)
    assert row.step_nanoseconds == 1_750_000_000
    assert (row.kv_byte_seconds, row.loaded_bytes, row.fetched_bytes) == (1003, 35, 20)
    assert row.completion_tokens == WHOLE.counts.num_completion_tokens


def test_a_charge_does_not_wait_for_ever_for_an_end(
    home: Path, principal: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "END_SECONDS", 0.1)
    row = settle_with(home, principal, end_with(Resources(2.0)), end_with(None))
    assert row.step_nanoseconds == 2_000_000_000


def test_a_wait_for_an_end_that_is_cancelled_leaves_nothing_behind() -> None:
    async def scenario() -> set[asyncio.Task[Any]]:
        waiting = asyncio.create_task(used_by([end_with(None)], patience_seconds=60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == set()
