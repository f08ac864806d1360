"""Serves a moderate mixed load and checks that no process of the server grows.

    make soak       or: PYTHONPATH=.src:tests python -m benchmarks.quiet_minutes [--minutes 40]

A server with a tiny model, and with more adapters than its device, memory and disk cache hold.
Tenants chat, stream, disconnect, use schemas, push, delete, read, and make mistakes
(`benchmarks.quiet_load`). Bounded caches are filled first: SQLite's pages, compiled grammars, the
KV cache. After a warm-up, the memory of every process of the server is sampled from /proc
(resident, proportional and private) every few seconds.

Prints one JSON object; exits with 1 unless

- for each long-lived process the upper end of the 95 % confidence interval of its growth
  (`benchmarks.growth`) is below 4 MB of resident memory per hour,
- the API server, the engine, the fetcher and the grammar checker ran all the time,
- every request ended as expected for its kind, and the server exits with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from benchmarks.growth import BLOCK_SECONDS, MIN_BLOCKS
from benchmarks.process_memory import MemoryWatch
from benchmarks.quiet_load import Customer, QuietLoad
from benchmarks.shared_tenant import AdapterFiles, Tenant
from sqlalchemy import insert

from loraplex.platform.base import utc_now
from loraplex.platform.requests.models import RequestLogEntry
from support.exact_usage import CHECKER, ENGINE, FETCHER, SERVER
from support.models import make_adapter, make_tiny_llama
from support.server import ServerUnderTest, serving

MAX_MEGABYTES_PER_HOUR = 4.0
LONG_LIVED = {SERVER, ENGINE, FETCHER, CHECKER}
NUM_TENANTS = 3
ADAPTERS_PER_TENANT = 10
RANK = 32
"""About 240 kB an adapter: the arena and the host cache hold four each, the disk too."""
CACHES = ("--arena-gib", "0.001", "--host-cache-gib", "0.001", "--kv-cache-gib", "0.004")
"""The KV cache keeps prefixes, and is so small that all of it is used before the warm-up ends."""
BOUNDS = {
    "LORAPLEX_DISK_CACHE_BYTES": "1000000",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
"""oneDNN compiles a product for each number of rows, and it and PyTorch keep 1,024 each: 700 MB,
which come together over hours."""
NUM_REMEMBERED = 20_000
NUM_READERS = 6
PAGE, READ_PAUSE_SECONDS = "500", 0.5
NUM_SCHEMAS = 300
"""The engine keeps 256 compiled ones."""
WARM_UP_PACE = 5.0
"""With the 12 minutes of the warm-up as much load as in an hour. Shorter warm-ups ended while the
API server's heap still grew by about 2 MB an hour; its live allocations stop growing after about an
hour of ordinary load."""
SAMPLE_SECONDS = 5.0
MAX_SURPRISES = 10
"""So many are shown."""


async def prepare(server: ServerUnderTest, base: str, files: AdapterFiles) -> list[Customer]:
    """Tenants with their adapters, all of them ready."""
    customers = []
    for number in range(NUM_TENANTS):
        caller = server.make_caller(f"tenant-{number}")
        names = [f"bot-{each}" for each in range(ADAPTERS_PER_TENANT)]
        tenant = Tenant(server.url, caller.key, base)
        for name in names:
            state = await tenant.push(name, files.config, files.make())
            assert state == "ready", state
        await tenant.aclose()
        customers.append(Customer(server.url, caller.key, names))
    return customers


def remember_requests(server: ServerUnderTest, num_requests: int) -> None:
    """Write so many answered requests into the log, as if the server had been there for days."""
    tenants = [caller.tenant_id for caller in server.callers]
    now = utc_now()
    rows = [
        {
            "tenant_id": tenants[number % len(tenants)],
            "request_id": f"req-{number:024x}",
            "created_at": now - timedelta(seconds=number),
            "route": "/v1/chat/completions",
            "status": 200,
            "model": f"bot-{number % ADAPTERS_PER_TENANT}@1",
            "total_ms": 100.0,
        }
        for number in range(num_requests)
    ]
    database = server.database
    with closing(database), database.platform_transaction() as session:
        session.execute(insert(RequestLogEntry), rows)


@asynccontextmanager
async def reading_log(url: str, operator_key: str) -> AsyncIterator[None]:
    """Page through the log until the block is left, several at a time.

    Every connection to SQLite keeps up to 2 MB of the pages that it has read. Behind this all of
    them have as much as they will ever have.
    """
    headers = {"authorization": f"Bearer {operator_key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120.0) as client:

        async def read() -> None:
            after: dict[str, str] = {}
            while True:
                answer = await client.get("/admin/requests", params={"limit": PAGE, **after})
                page = answer.raise_for_status().json()
                after = {"after": page["next_after"]} if page["has_more"] else {}
                await asyncio.sleep(READ_PAUSE_SECONDS)

        readers = [asyncio.create_task(read()) for _ in range(NUM_READERS)]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            for outcome in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(outcome, asyncio.CancelledError), outcome


async def warm_up(load: QuietLoad, url: str, operator_key: str, seconds: float) -> None:
    """All happens more often, so that what has a bound comes to it."""
    usual_pace = load.pace
    load.pace = WARM_UP_PACE * usual_pace
    async with reading_log(url, operator_key):
        await asyncio.sleep(seconds)
    load.pace = usual_pace


async def be_watched(load: QuietLoad, watch: MemoryWatch, seconds: float) -> None:
    with watch.watching():
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, BLOCK_SECONDS))
            shown = {each.role: each.samples[-1].rss for each in watch.long_lived}
            print(f"{left:.0f} s left, {load.num_done} requests, {shown}", file=sys.stderr)


def paged(server: ServerUnderTest) -> dict[str, int]:
    """How often adapters were found where, loaded and put out."""
    names = (
        "loraplex_adapter_tier_hits_total",
        "loraplex_adapter_loads_total",
        "loraplex_adapter_evictions_total",
        "loraplex_disk_cache_evictions_total",
    )
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith(names))
    return {name.removeprefix("loraplex_"): int(float(value)) for name, value in found}


def soak(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    base = make_tiny_llama(home / "base")
    files = AdapterFiles(make_adapter(base, home / "adapter", seed=1, r=RANK))
    with serving(base, home / "data", *CACHES, **BOUNDS) as server:
        customers = asyncio.run(prepare(server, base.name, files))
        operator_key = server.make_operator("root")
        remember_requests(server, NUM_REMEMBERED)
        load = QuietLoad(
            customers,
            base=base.name,
            operator_key=operator_key,
            files=files,
            seed=options.seed,
            pace=options.pace,
        )
        watch = MemoryWatch(server.process.pid, SAMPLE_SECONDS)

        async def run() -> None:
            await load.fill(NUM_SCHEMAS)
            async with load.running():
                await warm_up(load, server.url, operator_key, options.warm_up * 60)
                await be_watched(load, watch, options.minutes * 60)

        asyncio.run(run())
        moved = paged(server)
        server.process.send_signal(signal.SIGTERM)
        exit_code = server.process.wait(60)
    return {
        "minutes": options.minutes,
        "warm_up_minutes": options.warm_up,
        "violations": violations(watch, load, exit_code),
        "exit_code": exit_code,
        "requests": load.num_done,
        "outcomes": load.outcomes,
        "adapters": moved,
        "passing_processes": watch.passing,
        "megabytes": {each.role: each.summary() for each in watch.long_lived},
    }


def violations(watch: MemoryWatch, load: QuietLoad, exit_code: int) -> list[str]:
    """What did not hold."""
    found = load.surprises[:MAX_SURPRISES]
    if more := len(load.surprises) - len(found):
        found.append(f"and {more} more of the kind")
    for each in watch.long_lived:
        growth = each.growth("rss")
        if growth.high >= MAX_MEGABYTES_PER_HOUR:
            found.append(f"{each.role} may grow by {growth.high:.1f} MB an hour")
    if gone := LONG_LIVED - {each.role for each in watch.long_lived}:
        found.append(f"not there all the time: {', '.join(sorted(gone))}")
    if exit_code:
        found.append(f"the server exited with {exit_code}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40.0, help="that are measured")
    parser.add_argument("--warm-up", type=float, default=12.0, help="minutes before these")
    parser.add_argument("--pace", type=float, default=1.0, help="how often, over the usual")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.minutes < MIN_BLOCKS + 1:
        parser.error(f"a slope takes {MIN_BLOCKS + 1} minutes")
    with tempfile.TemporaryDirectory() as home:
        figures = soak(options, Path(home))
    for violation in figures["violations"]:
        print(violation, file=sys.stderr)
    print(json.dumps(figures))
    return 1 if figures["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
