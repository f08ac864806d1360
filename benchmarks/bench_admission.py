"""The cost of limits per request: admission, and the ledger row with settlement.

    make bench-admission          ARGS="--rounds 300 DATABASE_URL ..."

Without a URL it uses a SQLite file in the temporary folder. One caller, alternating variants; the
ledger row alone is the cost of a request before limits existed. Databases must be empty.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from loraplex.platform.database import Database, database_name
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.service import Demand, Limits
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants import service as tenants
from loraplex.platform.usage import service as ledger
from loraplex.platform.usage.models import UsageRecord
from loraplex.platform.usage.service import Usage

SERVER_ID = "11111111-1111-4111-8111-111111111111"
MANY = 10**9
ALL_LIMITS = Limits(
    requests_per_minute=MANY,
    input_tokens_per_minute=MANY,
    output_tokens_per_minute=MANY,
    concurrent_requests=MANY,
    tokens_per_period=10**15,
)

_numbers = count()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("databases", nargs="*", metavar="DATABASE_URL")
    options = parser.parse_args(arguments)
    with _sqlite_unless(options.databases) as urls:
        for url in urls:
            _measure(url, options.rounds)


@contextmanager
def _sqlite_unless(urls: list[str]) -> Iterator[list[str]]:
    with TemporaryDirectory() as folder:
        yield urls or [f"sqlite:///{Path(folder) / 'loraplex.db'}"]


def _measure(url: str, rounds: int) -> None:
    database = Database(url)
    database.upgrade()
    tenant_ids = {"no limits": _tenant(database, None), "all limits": _tenant(database, ALL_LIMITS)}
    figures: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for limits, tenant_id in tenant_ids.items():
            request_id = f"req-{next(_numbers)}"
            for step, work in _steps(request_id, is_limited=limits == "all limits"):
                began, began_cpu = time.perf_counter(), time.thread_time()
                work(database, tenant_id)
                taken = time.perf_counter() - began, time.thread_time() - began_cpu
                figures.setdefault(f"{step}, {limits}", []).append(taken)
    print(database_name(url))
    for name, values in figures.items():
        wall, cpu = ([value * 1000 for value in values] for values in zip(*values, strict=True))
        p50, p99 = median(wall), quantiles(wall, n=100)[98]
        print(f"  {name:34} p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  CPU {median(cpu):6.2f} ms")
    database.close()


def _tenant(database: Database, limits: Limits | None) -> str:
    with database.platform_transaction() as session:
        tenant_id = tenants.create_tenant(session, "all" if limits else "none").id
    if limits is not None:
        with database.transaction(tenant_id) as tenant_session:
            quotas.set_limits(tenant_session, limits)
    return tenant_id


def _steps(
    request_id: str, *, is_limited: bool
) -> list[tuple[str, Callable[[Database, str], None]]]:
    demand = Demand(
        request_id=request_id, key_id=None, adapter=None, input_tokens=100, output_tokens=100
    )
    usage = Usage(
        request_id=request_id,
        prompt_tokens=100,
        cached_tokens=0,
        completion_tokens=50,
        finish_reason="stop",
    )

    def admit(database: Database, tenant_id: str) -> None:
        with database.statements(tenant_id) as session:
            quotas.reserve(session, demand, server_id=SERVER_ID)

    def record(database: Database, tenant_id: str) -> None:
        with database.statements(tenant_id) as session:
            ledger.record(session, usage)

    def add_row(database: Database, tenant_id: str) -> None:
        with database.transaction(tenant_id) as session:
            _add_row(session, f"{request_id}-alone")

    admission = [("admission", admit)] if is_limited else []  # nobody is asked where nothing is
    return [*admission, ("ledger and settling", record), ("ledger row alone", add_row)]


def _add_row(session: TenantSession, request_id: str) -> None:
    session.add(
        UsageRecord(
            request_id=request_id,
            prompt_tokens=100,
            cached_tokens=0,
            completion_tokens=50,
            finish_reason="stop",
        )
    )


if __name__ == "__main__":
    main()
