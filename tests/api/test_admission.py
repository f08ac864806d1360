"""Reservations of a client that disconnects, and after a process that died."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.inference import admission as module
from loraplex.api.inference.admission import Admission
from loraplex.api.inference.inference import Inference
from loraplex.api.inference.inference import _demand as demand_of
from loraplex.api.inference.ledger_writer import Charge, LedgerWriter, Owner
from loraplex.api.inference.order import Order
from loraplex.api.inference.served_models import ServedModel
from loraplex.api.server.server_id import FILE, load_or_create_server_id
from loraplex.api.telemetry.request_measures import RequestMeasures
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.text_form import TextForm
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseBusy, DatabaseUnavailable, TooManyRequestsAtOnce
from loraplex.platform.quotas.models import Reservation
from loraplex.platform.sessions import TenantStatements
from support.catalog import make_tenant
from support.databases import copy_of_migrated_sqlite, migrate, new_postgres_url
from support.limits import SERVER_ID, limit, make_demand

Result = TypeVar("Result")


class HeldControlPlane(ControlPlane):
    """Its work waits for `may_begin`, its writes for `may_write`, and then they fail as is said."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, b"secret" * 8)
        self.may_begin = threading.Event()
        self.may_write = threading.Event()
        self.may_begin.set()
        self.may_write.set()
        self.is_writing = asyncio.Event()
        self.failures: list[Exception] = []
        self.num_written = 0

    async def _run(self, tenant_id: str | None, work: Callable[[], Result]) -> Result:
        may_begin = self.may_begin

        def run() -> Result:
            assert may_begin.wait(10)
            return work()

        return await super()._run(tenant_id, run)

    async def write_plain(
        self, tenant_id: str, change: Callable[[TenantStatements], Result]
    ) -> Result:
        loop = asyncio.get_running_loop()

        def held(session: TenantStatements) -> Result:
            loop.call_soon_threadsafe(self.is_writing.set)
            assert self.may_write.wait(10)
            if self.failures:
                raise self.failures.pop()
            return change(session)

        result = await super().write_plain(tenant_id, held)
        self.num_written += 1
        return result


class Bench:
    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.tenant_id = make_tenant(self.database, "acme").id
        limit(self.database, self.tenant_id, concurrent_requests=10)
        self.control_plane = HeldControlPlane(self.database)
        self.ledger = LedgerWriter(self.control_plane)
        self.open: set[str] = set()
        self.admission = self.make_admission(SERVER_ID)
        self.measures = RequestMeasures()

    def make_admission(self, server_id: str) -> Admission:
        return Admission(self.control_plane, self.ledger, server_id, is_open=self.open.__contains__)

    async def admit(self, request_id: str = "req-1") -> None:
        await self.admission.admit(self.tenant_id, make_demand(request_id), self.measures)

    async def cancel_admission(self) -> None:
        """Of a request whose reservation is being written."""
        self.control_plane.may_write.clear()
        admitting = asyncio.create_task(self.admit())
        await self.control_plane.is_writing.wait()
        admitting.cancel()
        self.control_plane.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await admitting

    def reserved(self) -> list[str]:
        with self.database.transaction(self.tenant_id, read_only=True) as session:
            return sorted(session.scalars(select(Reservation.request_id)))

    async def until_written(self, num_written: int) -> None:
        async with asyncio.timeout(10):
            while self.control_plane.num_written < num_written:
                await asyncio.sleep(0.01)

    async def until_released(self) -> None:
        """Until the second write, after that of the reservation, is there."""
        await self.until_written(2)
        assert self.reserved() == []

    async def settle(self, request_id: str) -> None:
        """As its account does before it is given back."""
        owner = Owner(request_id, self.tenant_id, None, None, None, None)
        charge = Charge(
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=1,
            tier=None,
            load_ms=None,
            finish_reason="stop",
            ended_at=datetime.now(UTC),
        )
        assert await self.ledger.write(owner, charge)
        self.open.remove(request_id)


Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


def run_at(url: str, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def within() -> None:
        bench = Bench(url)
        try:
            await test(bench)
        finally:
            bench.control_plane.may_begin.set()
            await bench.admission.close()
            bench.control_plane.close()

    asyncio.run(within())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a test with an admission of its own, which it closes."""
    return lambda test: run_at(copy_of_migrated_sqlite(tmp_path), test)


@pytest.fixture(params=["sqlite", "postgres"])
def run_on_both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """The same, on each kind of database."""
    if request.param == "sqlite":
        yield lambda test: run_at(copy_of_migrated_sqlite(tmp_path), test)
        return
    with new_postgres_url() as url:
        migrate(url)
        yield lambda test: run_at(url, test)


def order_of(**principal: Any) -> Order:
    """Two prompts of three and one tokens, with two choices of each."""
    return Order(
        request_id="req-1",
        arrived_at=0.0,
        principal=cast(
            Any, SimpleNamespace(tenant_id="acme", key_id="key", user_id=None, **principal)
        ),
        model=ServedModel("base", None),
        prompts=[[1, 2, 3], [4]],
        num_choices=2,
        sampling=SamplingParams(max_tokens=10),
        text=TextForm(continues_prompt=True),
    )


def test_a_request_asks_for_all_its_prompts_once_and_the_output_of_all_its_choices() -> None:
    demand = demand_of(order_of())
    assert (demand.request_id, demand.key_id, demand.adapter) == ("req-1", "key", None)
    assert (demand.input_tokens, demand.output_tokens) == (4, 2 * 2 * 10)


@pytest.mark.parametrize(
    ("failure", "raised"), [(DatabaseUnavailable(), None), (DatabaseBusy(), DatabaseBusy)]
)
def test_limits_rest_while_the_database_is_away_but_not_while_others_hold_it(
    failure: Exception, raised: type[Exception] | None
) -> None:
    admit = AsyncMock(side_effect=failure)
    inference = cast(Any, SimpleNamespace(_admission=SimpleNamespace(admit=admit)))
    admitting = Inference._admit(inference, order_of(is_limited=True))
    with nullcontext() if raised is None else pytest.raises(raised):
        asyncio.run(admitting)
    admit.assert_awaited_once()


def test_nothing_is_reserved_where_nothing_limits_requests(run: Run) -> None:
    async def test(bench: Bench) -> None:
        limit(bench.database, bench.tenant_id, keys=1, stored_bytes=0)
        await bench.admit("a")
        assert (bench.reserved(), bench.measures.standing) == ([], {})

    run(test)


def test_a_refusal_says_what_is_left_and_reserves_nothing(run: Run) -> None:
    async def test(bench: Bench) -> None:
        limit(bench.database, bench.tenant_id, concurrent_requests=1, requests_per_minute=5)
        await bench.admit("a")
        bench.measures = RequestMeasures()
        with pytest.raises(TooManyRequestsAtOnce):
            await bench.admit("b")
        assert bench.measures.standing
        assert bench.reserved() == ["a"]

    run(test)


def test_who_goes_away_while_it_is_reserved_keeps_nothing(run: Run) -> None:
    async def test(bench: Bench) -> None:
        await bench.cancel_admission()
        await bench.until_released()

    run(test)


def test_who_goes_away_as_the_database_does_keeps_nothing(run: Run) -> None:
    async def test(bench: Bench) -> None:
        plane = bench.control_plane
        write_plain = plane.write_plain

        async def lose_the_answer(*given: Any) -> Any:
            plane.write_plain = write_plain  # type: ignore[method-assign]
            await write_plain(*given)
            raise DatabaseUnavailable

        plane.write_plain = lose_the_answer  # type: ignore[assignment, method-assign]
        await bench.cancel_admission()
        await bench.until_released()

    run(test)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (DatabaseUnavailable(), "release_delayed"),
        (RuntimeError("anything else"), "release_failed"),
    ],
)
def test_what_could_not_be_released_is_released_by_a_sweep(
    run: Run, monkeypatch: pytest.MonkeyPatch, failure: Exception, said: str
) -> None:
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.01)

    async def test(bench: Bench) -> None:
        bench.admission.start()
        bench.open.update(("a", "b"))
        await bench.admit("a")
        await bench.admit("b")
        bench.control_plane.failures = [failure] * 4
        bench.open.clear()
        await bench.until_written(4)
        assert bench.reserved() == []

    with capture_logs() as logs:
        run(test)
    events = [(entry["event"], entry.get("request_id")) for entry in logs]
    assert {told for told in events if told[0].startswith("release")} == {(said, "a"), (said, "b")}


def test_what_is_committed_after_its_request_was_settled_is_released_by_a_sweep(
    run_on_both: Run,
) -> None:
    async def test(bench: Bench) -> None:
        plane = bench.control_plane
        bench.open.add("late")
        plane.may_begin.clear()
        admitting = asyncio.create_task(bench.admit("late"))
        async with asyncio.timeout(10):
            while not plane.watch._working:
                await asyncio.sleep(0.01)
        plane.watch._note(is_away=True)
        with pytest.raises(DatabaseUnavailable):
            await admitting
        plane.watch._note(is_away=False)
        given_up, plane.may_begin = plane.may_begin, threading.Event()
        plane.may_begin.set()
        await bench.settle("late")
        given_up.set()
        async with asyncio.timeout(10):
            while not bench.reserved():
                await asyncio.sleep(0.01)
        await bench.make_admission("another server").sweep()
        assert bench.reserved() == ["late"]
        await bench.admission.sweep()
        assert bench.reserved() == []

    run_on_both(test)


def test_a_sweep_leaves_what_runs(run_on_both: Run) -> None:
    async def test(bench: Bench) -> None:
        bench.open.add("runs")
        await bench.admit("runs")
        await bench.admit("left")
        await bench.admission.sweep()
        assert bench.reserved() == ["runs"]

    run_on_both(test)


def test_a_new_process_releases_what_the_old_one_left(run: Run) -> None:
    async def test(bench: Bench) -> None:
        await bench.admit("a")
        other = bench.make_admission("another server")
        await other.admit(bench.tenant_id, make_demand("b"), RequestMeasures())
        await bench.make_admission(SERVER_ID).sweep()
        assert bench.reserved() == ["b"]

    run(test)


@pytest.mark.parametrize("spoiled", [None, "", "not an id"])
def test_a_server_keeps_its_id(tmp_path: Path, spoiled: str | None) -> None:
    if spoiled is not None:
        (tmp_path / FILE).write_text(spoiled)
    first = load_or_create_server_id(tmp_path)
    assert first != spoiled
    assert load_or_create_server_id(tmp_path) == first
