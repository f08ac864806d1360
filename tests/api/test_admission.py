"""Reserving for a caller who goes away, and after a process that did."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import select

from loraplex.api.control_plane import ControlPlane
from loraplex.api.request_measures import RequestMeasures
from loraplex.api.server_id import FILE, load_or_create_server_id
from loraplex.api.services import admission as module
from loraplex.api.services.admission import Admission
from loraplex.api.services.ledger_writer import LedgerWriter
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable, TooManyRequestsAtOnce
from loraplex.platform.quotas.models import Reservation
from loraplex.platform.sessions import TenantStatements
from support.catalog import make_tenant
from support.databases import copy_of_migrated_sqlite
from support.limits import SERVER_ID, limit, make_demand

Result = TypeVar("Result")


class HeldControlPlane(ControlPlane):
    """Its writes wait for `may_write`, and then fail as often as is said."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, b"secret" * 8)
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_writing = asyncio.Event()
        self.num_failures = 0
        self.num_written = 0

    async def write_plain(
        self, tenant_id: str, change: Callable[[TenantStatements], Result]
    ) -> Result:
        loop = asyncio.get_running_loop()

        def held(session: TenantStatements) -> Result:
            loop.call_soon_threadsafe(self.is_writing.set)
            assert self.may_write.wait(10)
            if self.num_failures:
                self.num_failures -= 1
                raise DatabaseUnavailable
            return change(session)

        result = await super().write_plain(tenant_id, held)
        self.num_written += 1
        return result


class Bench:
    def __init__(self, folder: Path) -> None:
        self.database = Database(copy_of_migrated_sqlite(folder))
        self.tenant_id = make_tenant(self.database, "acme").id
        limit(self.database, self.tenant_id, concurrent_requests=10)
        self.control_plane = HeldControlPlane(self.database)
        self.ledger = LedgerWriter(self.control_plane)
        self.admission = Admission(self.control_plane, self.ledger, SERVER_ID)
        self.measures = RequestMeasures()

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

    async def until_released(self) -> None:
        """Until the second write, after that of the reservation, is there."""
        async with asyncio.timeout(10):
            while self.control_plane.num_written < 2:
                await asyncio.sleep(0.01)
        assert self.reserved() == []


Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a test with an admission of its own, which it closes."""

    async def within(test: Callable[[Bench], Awaitable[None]]) -> None:
        bench = Bench(tmp_path)
        try:
            await test(bench)
        finally:
            await bench.admission.close()
            bench.control_plane.close()

    return lambda test: asyncio.run(within(test))


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


def test_what_could_not_be_released_is_released_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RELEASE_RETRY_SECONDS", 0.01)

    async def test(bench: Bench) -> None:
        await bench.admit("a")
        bench.control_plane.num_failures = 3
        await bench.admission.recover()
        assert bench.reserved() == ["a"]
        await bench.until_released()

    run(test)


def test_a_new_process_releases_what_the_old_one_left(run: Run) -> None:
    async def test(bench: Bench) -> None:
        await bench.admit("a")
        other = Admission(bench.control_plane, bench.ledger, "another server")
        await other.admit(bench.tenant_id, make_demand("b"), RequestMeasures())
        await Admission(bench.control_plane, bench.ledger, SERVER_ID).recover()
        assert bench.reserved() == ["b"]

    run(test)


@pytest.mark.parametrize("spoiled", [None, "", "not an id"])
def test_a_server_keeps_its_id(tmp_path: Path, spoiled: str | None) -> None:
    if spoiled is not None:
        (tmp_path / FILE).write_text(spoiled)
    first = load_or_create_server_id(tmp_path)
    assert first != spoiled
    assert load_or_create_server_id(tmp_path) == first
