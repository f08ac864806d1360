"""Writing the request log: a failure causes only a gap."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.telemetry.request_log import RequestLog
from loraplex.api.telemetry.request_measures import RequestMeasures
from loraplex.platform.errors import DatabaseUnavailable
from loraplex.platform.requests.models import LogRow


class Session:
    """Takes what is added."""

    def __init__(self, written: list[str]) -> None:
        self._written = written

    def connection(self) -> Session:
        return self

    def execute(self, statement: Any, rows: Sequence[LogRow]) -> None:
        self._written += [row["request_id"] for row in rows]


class Writing:
    """Stands in for the control plane."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.failure: Exception | None = None
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def write_all_tenants(self, change: Callable[[Any], None]) -> None:
        await self.may_go_on.wait()
        if self.failure is not None:
            raise self.failure
        change(Session(self.written))


def note(log: RequestLog, request_id: str) -> None:
    log.add(
        request_id=request_id,
        tenant_id="acme",
        key_id=None,
        route="/v1/completions",
        status=200,
        code="",
        seconds=0.1,
        measures=RequestMeasures(),
    )


@pytest.mark.parametrize("failure", [DatabaseUnavailable(), ValueError("a value it refuses")])
def test_the_log_goes_on_behind_what_cannot_be_written(failure: Exception) -> None:
    async def run() -> list[str]:
        writing = Writing()
        log = RequestLog(cast(ControlPlane, writing), Metrics(lambda: None))
        writing.failure = failure
        note(log, "lost")
        await log.flush()
        writing.failure = None
        note(log, "kept")
        await log.flush()
        return writing.written

    assert asyncio.run(run()) == ["kept"]


def test_a_reader_waits_for_what_is_being_written() -> None:
    async def run() -> list[str]:
        writing = Writing()
        log = RequestLog(cast(ControlPlane, writing), Metrics(lambda: None))
        writing.may_go_on.clear()
        note(log, "just ended")
        first = asyncio.create_task(log.flush())
        await asyncio.sleep(0)
        reader = asyncio.create_task(log.flush())
        await asyncio.sleep(0)
        assert not reader.done()
        writing.may_go_on.set()
        await reader
        seen = list(writing.written)
        await first
        return seen

    assert asyncio.run(run()) == ["just ended"]
