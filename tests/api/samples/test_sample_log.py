"""Samples on their way to the database: bounded, never in the way of answers, and counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from loraplex.adapters.identity import AdapterKey
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.samples import sample_log
from loraplex.api.samples.content import Answered, CompletionContent, Content
from loraplex.api.samples.sample_log import SampleLog
from loraplex.api.telemetry.metrics import Metrics
from loraplex.platform.adapters import registry
from loraplex.platform.adapters.registry import AdapterRef
from loraplex.platform.adapters.sampling import is_sampled, stop_sampling
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable
from loraplex.platform.models import Sample
from loraplex.platform.samples.models import SampleKind
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant, make_version
from support.samples import SEAL, opt_in

COUNTS = SimpleNamespace(num_prompt_tokens=3, num_completion_tokens=2)


@dataclass
class Bench:
    """A log over a database with one adapter that is sampled as a whole."""

    database: Database
    tenant: Tenant
    adapter: AdapterRef
    metrics: Metrics
    log: SampleLog

    def add(self, text: str, *, adapter: AdapterRef | None = None, prompt: str = "Once") -> None:
        """A request whose answer is this text."""
        opened = self.log.open("req-1", adapter or self.adapter, lambda: CompletionContent(prompt))
        assert opened is not None
        opened.complete(text, "stop", COUNTS)

    def texts(self) -> list[str]:
        """The answers in the database, in any order."""
        with self.database.transaction(self.tenant.id, read_only=True) as session:
            rows = session.scalars(select(Sample)).all()
            return sorted(json.loads(SEAL.open(row))["completion"] for row in rows)

    def counted(self) -> tuple[int, int]:
        """The samples that were kept and dropped."""
        lines = dict(line.rsplit(" ", 1) for line in self.metrics.render().decode().splitlines())
        kept, dropped = (
            float(lines.get(f'loraplex_samples_total{{outcome="{outcome}"}}', 0))
            for outcome in ("kept", "dropped")
        )
        return int(kept), int(dropped)


Use = Callable[[Callable[[Bench], Awaitable[None]]], Bench]


@pytest.fixture
def run(database: Database) -> Use:
    """Runs a test with a log, which is closed at the end."""

    def run_it(work: Callable[[Bench], Awaitable[None]], max_days: int = 30) -> Bench:
        tenant = make_tenant(database, "acme")
        with database.transaction(tenant.id) as session:
            make_version(session)
            opt_in(session)
            name = registry.parse_model_name("support-bot")
            adapter = registry.resolve(session, name, tenant_slug="acme").main
        control_plane, metrics = ControlPlane(database, b"s" * 32), Metrics(lambda: None)

        async def use() -> Bench:
            log = SampleLog(control_plane, metrics, SEAL, max_days=max_days)
            bench = Bench(database, tenant, adapter, metrics, log)
            await work(bench)
            await log.close()
            return bench

        bench = asyncio.run(use())
        control_plane.close()
        return bench

    return run_it


def test_what_is_pending_is_written_in_batches_and_at_the_end(
    run: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "MAX_BATCH", 3)

    async def work(bench: Bench) -> None:
        for number in range(8):
            bench.add(str(number))
        await bench.log.flush()
        assert bench.texts() == list("01234567")
        bench.add("8")

    bench = run(work)
    assert bench.texts() == list("012345678")
    assert bench.counted() == (9, 0)


def test_a_request_that_was_not_drawn_costs_nothing(run: Use) -> None:
    async def work(bench: Bench) -> None:
        def make() -> Content:
            raise AssertionError("nobody wants it")

        off = replace(bench.adapter, sampled_percent=0.0)
        assert bench.log.open("req-1", off, make) is None
        some = replace(bench.adapter, sampled_percent=30.0)
        for number in range(200):
            request_id = f"req-{number}"
            drawn = bench.log.open(request_id, some, lambda: CompletionContent("x"))
            expected = is_sampled(30.0, adapter_id=some.adapter_id, request_id=request_id)
            assert (drawn is not None) == expected

    run(work)


def test_nothing_is_drawn_where_the_operator_allows_no_samples(database: Database) -> None:
    log = SampleLog(ControlPlane(database, b"s" * 32), Metrics(lambda: None), SEAL, max_days=0)
    adapter: Any = SimpleNamespace(sampled_percent=100.0, adapter_id="a")
    assert log.open("req-1", adapter, lambda: CompletionContent("x")) is None


def test_large_samples_and_those_beyond_the_bounds_are_dropped_and_counted(
    run: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "MAX_SAMPLE_BYTES", 200)
    monkeypatch.setattr(sample_log, "MAX_TENANT_PENDING_BYTES", 3 * 1100)
    monkeypatch.setattr(sample_log, "MAX_PENDING_BYTES", 4 * 1100)

    async def work(bench: Bench) -> None:
        bench.add("x" * 200)
        for number in range(4):
            bench.add(str(number))
        assert bench.counted() == (0, 2), "the large one, and the tenant's fourth"
        bolt = make_tenant(bench.database, "bolt")
        key = AdapterKey(bolt.id, bench.adapter.key.digest)
        for _ in range(2):
            bench.add("y", adapter=replace(bench.adapter, key=key))
        assert bench.counted() == (0, 3), "all tenants together"
        await bench.log.flush()
        bench.add("4")

    bench = run(work)
    assert bench.texts() == list("0124"), "a flush makes room again"
    assert bench.counted() == (4, 3), "an adapter that is not the tenant's has no opt-in"


def test_samples_of_a_database_that_is_away_are_dropped_without_a_word_of_them(
    run: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(bench: Bench) -> None:
        async def fail(*_: object) -> None:
            raise DatabaseUnavailable

        async def break_down(*_: object) -> None:
            raise RuntimeError("the zebra is in this message")

        for failure in (fail, break_down):
            with monkeypatch.context() as patch:
                patch.setattr(ControlPlane, "write", failure)
                bench.add("zebra")
                with capture_logs() as logged:
                    await bench.log.flush()
                (entry,) = logged
                assert entry["event"] == "samples_not_written"
                assert "zebra" not in str(entry)

    bench = run(work)
    assert bench.texts() == []
    assert bench.counted() == (0, 2)


def test_an_opt_in_that_ended_before_the_write_is_respected(run: Use) -> None:
    async def work(bench: Bench) -> None:
        bench.add("late")
        with bench.database.transaction(bench.tenant.id) as session:
            stop_sampling(session, "support-bot")

    bench = run(work)
    assert bench.texts() == []
    assert bench.counted() == (0, 0)


def test_a_sample_that_cannot_be_made_fails_no_request_and_is_not_quoted(run: Use) -> None:
    class Broken:
        kind = SampleKind.CHAT

        def answered(self, text: str) -> Answered:
            raise ValueError(f"cannot read {text}")

    async def work(bench: Bench) -> None:
        opened = bench.log.open("req-1", bench.adapter, Broken)
        assert opened is not None
        with capture_logs() as logged:
            opened.complete("zebra", "stop", COUNTS)
        (entry,) = logged
        assert (entry["event"], entry["error"]) == ("sample_failed", "ValueError")
        assert "zebra" not in str(entry)

    assert run(work).texts() == []
