"""Byte-seconds on the device: an observed state counts until the next observation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import select

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.adapters.status import AdapterStatus
from loraplex.api.adapters.device_usage import DeviceUsageMeter, DeviceUsageSums
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.engine.messages import EngineStats
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable
from loraplex.platform.models import UsageDay
from loraplex.platform.usage.repository import DeviceUsage
from support.catalog import make_digest, make_tenant, make_version
from support.databases import copy_of_migrated_sqlite

A, B = AdapterKey("acme", "sha256:a"), AdapterKey("bolt", "sha256:b")
FIRST, SECOND, THIRD = date(2026, 2, 28), date(2026, 3, 1), date(2026, 3, 2)


@dataclass
class Clock:
    """Both clocks, moved together."""

    now: datetime = datetime(2026, 2, 28, 12, tzinfo=UTC)
    seconds: float = 100.0

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.seconds += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def integral(clock: Clock) -> DeviceUsageSums:
    return DeviceUsageSums(monotonic=lambda: clock.seconds, now=lambda: clock.now)


def test_each_content_counts_while_it_is_there(clock: Clock, integral: DeviceUsageSums) -> None:
    integral.look({A: 1000})
    clock.pass_time(2.5)
    integral.look({A: 1000, B: 10})
    clock.pass_time(4)
    integral.look({B: 10})
    clock.pass_time(1)
    integral.look({})
    clock.pass_time(50)
    integral.look({})
    assert integral.take() == {
        "acme": [DeviceUsage(FIRST, A.digest, 6500)],
        "bolt": [DeviceUsage(FIRST, B.digest, 50)],
    }
    assert integral.take() == {}


def test_days_are_cut_at_midnight(clock: Clock, integral: DeviceUsageSums) -> None:
    clock.now = datetime(2026, 2, 28, 23, 59, 50, tzinfo=UTC)
    integral.look({A: 2})
    clock.pass_time(10 + 24 * 3600 + 5)
    integral.look({A: 2})
    expected = [
        DeviceUsage(FIRST, A.digest, 20),
        DeviceUsage(SECOND, A.digest, 2 * 24 * 3600),
        DeviceUsage(THIRD, A.digest, 10),
    ]
    assert sorted(integral.take()["acme"]) == expected


def test_fractions_are_kept_and_what_was_not_written_comes_again(
    clock: Clock, integral: DeviceUsageSums
) -> None:
    total = 0
    for _ in range(10):
        integral.look({A: 3})
        clock.pass_time(0.25)
        for tenant_id, residencies in integral.take().items():
            total += sum(entry.byte_seconds for entry in residencies)
            if total == 1:
                integral.put_back(tenant_id, residencies)
                total = 0
    integral.look({})
    total += sum(entry.byte_seconds for entry in integral.take()["acme"])
    assert total == int(10 * 0.25 * 3)


async def always() -> bool:
    return True


def test_it_is_written_for_the_version_when_the_server_stops(tmp_path: Path) -> None:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    tenant = make_tenant(database, "acme")
    with database.transaction(tenant.id) as session:
        make_version(session, "bot", "weights")
        make_version(session, "bot", "in host memory")
    key = AdapterKey(tenant.id, make_digest("weights"))
    in_host = AdapterKey(tenant.id, make_digest("in host memory"))
    held = [
        AdapterStatus(key, Tier.DEVICE, 10_000_000, 0),
        AdapterStatus(in_host, Tier.HOST, 10_000_000, 0),
    ]
    stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, adapters=held)

    async def scenario() -> None:
        control_plane = ControlPlane(database, b"secret" * 8)
        usage = DeviceUsageMeter(lambda: stats, control_plane, is_ours=always)
        usage.start()
        await asyncio.sleep(0.7)
        await usage.close()
        control_plane.close()

    asyncio.run(scenario())
    with database.transaction(tenant.id, read_only=True) as reading:
        (row,) = reading.scalars(select(UsageDay)).all()
    assert (row.adapter_name, row.adapter_version, row.num_requests) == ("bot", 1, 0)
    assert row.residency_byte_seconds >= 5_000_000
    database.close()


def test_what_the_database_could_not_take_is_written_later_and_no_other_tenant_waits() -> None:
    written: list[str] = []
    failures: dict[str, Exception] = {"acme": DatabaseUnavailable(), "defect": ValueError()}

    class Plane:
        async def write(self, tenant_id: str, _: object) -> None:
            if failure := failures.pop(tenant_id, None):
                raise failure
            written.append(tenant_id)

    async def scenario() -> None:
        meter = DeviceUsageMeter(lambda: None, cast(ControlPlane, Plane()), is_ours=always)
        for tenant_id in ("acme", "defect", "bolt"):
            meter._integral.put_back(tenant_id, [DeviceUsage(FIRST, A.digest, 5)])
        await meter._write()
        assert written == ["bolt"]
        await meter._write()
        assert written == ["bolt", "acme"]

    asyncio.run(scenario())


def test_what_another_server_counts_is_not_written_twice() -> None:
    written: list[str] = []
    owned = iter([False, True])

    class Plane:
        async def write(self, tenant_id: str, _: object) -> None:
            written.append(tenant_id)

    async def is_ours() -> bool:
        return next(owned)

    async def scenario() -> None:
        meter = DeviceUsageMeter(lambda: None, cast(ControlPlane, Plane()), is_ours=is_ours)
        for tenant_id in ("acme", "bolt"):
            meter._integral.put_back(tenant_id, [DeviceUsage(FIRST, A.digest, 5)])
            await meter._write()
        assert written == ["bolt"]

    asyncio.run(scenario())
