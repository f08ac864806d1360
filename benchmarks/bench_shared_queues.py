"""The latency of a quiet tenant next to a tenant that fills every shared queue.

    make bench-shared-queues          ARGS=--smoke: tiny sizes, only checks that it runs

A real server with a base of 125 million parameters; its store responds after 0.25 s. The loud
tenant keeps 24 commits of 15 MB open, repeatedly requests 800 adapters at once, more than the
caches hold, and sends prompts of 4 MiB. The quiet tenant pushes an adapter, requests an adapter
that was never used, and streams an answer of the base, alternately alone and next to the loud
tenant. The figures are the ratios of medians and of p95 (bars: 2 and 3).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, repeat
from pathlib import Path

from benchmarks.report import parse_options, print_report
from benchmarks.shared_tenant import WEIGHTS, AdapterFiles, Tenant
from benchmarks.timed_engine import SMOKE_SHAPE
from sqlalchemy import insert

from loraplex.adapters.examination import examine
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import layout_from_json
from loraplex.adapters.niceness import yield_processor
from loraplex.adapters.store import object_key
from loraplex.adapters.store.local import LocalStore
from loraplex.api.bench.models import BaseShape, make_adapter, make_base
from loraplex.platform.adapters.models import Adapter, AdapterVersion
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.base import new_id, utc_now
from support.server import Caller, ServerUnderTest, serving

MEASURES = ("push", "cold start", "ttft", "itl")
POLL_SECONDS = 0.05
"""How exactly the quiet tenant's pushes are measured."""


SHAPE = BaseShape(max_model_len=2_048)


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = SHAPE
    small_rank: int = 2
    large_rank: int = 46
    """15 MB in bfloat16."""
    num_commits: int = 24
    num_cold: int = 800
    num_long: int = 2
    """Prompts of 4 MiB at a time."""
    long_bytes: int = (4 << 20) - 1_024
    """The most that a body may have, its other fields apart."""
    num_blocks: int = 2
    tries_per_block: int = 12
    output_tokens: int = 48
    latency_seconds: float = 0.25
    fill_seconds: float = 4.0
    """From the loud tenant's first request to the quiet one's beside it."""

    @property
    def load(self) -> dict[str, float]:
        """What the loud tenant keeps open, beside its cold adapters."""
        return {
            "commits": self.num_commits,
            "prompts": self.num_long,
            "prompt_bytes": self.long_bytes,
            "fill_seconds": self.fill_seconds,
        }


SMOKE = Plan(
    shape=replace(SMOKE_SHAPE, max_model_len=2_048),
    large_rank=16,
    num_commits=2,
    num_cold=4,
    num_blocks=1,
    tries_per_block=1,
    long_bytes=1 << 16,
    output_tokens=8,
    latency_seconds=0.05,
    fill_seconds=0.5,
)


@dataclass
class Samples:
    """Seconds, by what was measured."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def p95(self, name: str) -> float:
        ordered = sorted(self.seconds[name])
        return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


class Quiet:
    """What the quiet tenant does, one after another, measured."""

    def __init__(self, tenant: Tenant, files: AdapterFiles, cold: Iterator[str]) -> None:
        self._tenant = tenant
        self._files = files
        self._cold = cold
        self._number = 0

    async def try_once(self, samples: Samples, plan: Plan) -> None:
        self._number += 1
        begun_at = time.perf_counter()
        name, weights = f"new-{self._number}", self._files.make()
        state = await self._tenant.push(name, self._files.config, weights)
        assert state == "ready", state
        samples.seconds["push"].append(time.perf_counter() - begun_at)
        (cold, *_) = await self._tenant.ask(next(self._cold), "a cold start")
        samples.seconds["cold start"].append(cold)
        times = await self._tenant.ask_base(f"tell me {self._number}", plan.output_tokens)
        samples.seconds["ttft"].append(times[0])
        gaps = [later - earlier for earlier, later in pairwise(times)]
        samples.seconds["itl"].append(statistics.fmean(gaps))


class Loud:
    """The loud tenant's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.answers: dict[str, int] = {}
        """How many of each outcome so far."""

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        await self._say("begin")
        yield
        self.answers = json.loads(await self._say("end"))

    async def _say(self, line: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        return await self._process.stdout.readline()


@contextlib.asynccontextmanager
async def loud_tenant(directory: Path, facts: Mapping[str, object]) -> AsyncIterator[Loud]:
    (directory / "plan.json").write_text(json.dumps(facts))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.loud_tenant", str(directory)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    yield_processor(process.pid)  # its client would be on another machine
    try:
        yield Loud(process)
    finally:
        process.kill()
        await process.wait()


def seed(server: ServerUnderTest, caller: Caller, files: AdapterFiles, num: int) -> list[str]:
    """Ready adapters that lie in the store alone; their names."""
    data_dir = server.settings.data_dir
    layout = layout_from_json(next(data_dir.glob("layout-*.json")).read_text())
    store = LocalStore(data_dir / "store")
    adapters, versions, now = [], [], utc_now()
    with tempfile.TemporaryDirectory() as home:
        for number in range(num):
            weights, block = Path(home, WEIGHTS), Path(home, f"{number}.block")
            weights.write_bytes(files.make())
            report = examine(files.config, weights, block, layout=layout, serving_dtype="float32")
            key = AdapterKey(caller.tenant_id, report.digest)
            store.put_file(object_key(key), block, sha256=report.file_sha256)
            block.unlink()
            name, adapter_id = f"cold-{number}", new_id()
            own = {"id": adapter_id, "tenant_id": caller.tenant_id, "name": name}
            adapters.append({**own, "is_visible": True, "created_at": now})
            version = {"id": new_id(), "tenant_id": caller.tenant_id, "adapter_id": adapter_id}
            found = {
                "digest": report.digest,
                "base_id": report.base_id,
                "object_sha256": report.file_sha256,
                "size_bytes": report.size_bytes,
                "intake_report": {"max_rank": report.max_rank},
                "attestation_report": {},
            }
            standing = {"number": 1, "state": VersionState.READY, "state_changed_at": now}
            versions.append({**version, **found, **standing, "created_at": now})
    database = server.database
    with contextlib.closing(database), database.platform_transaction() as session:
        session.execute(insert(Adapter), adapters)
        session.execute(insert(AdapterVersion), versions)
    return [str(adapter["name"]) for adapter in adapters]


async def measure(server: ServerUnderTest, base: str, plan: Plan, home: Path) -> Figures:
    loud_caller, quiet_caller = server.make_caller("loud"), server.make_caller("quiet")
    make_adapter(home / "small", plan.shape, rank=plan.small_rank, seed=1)
    make_adapter(home / "large", plan.shape, rank=plan.large_rank, seed=2)
    small = AdapterFiles(home / "small")
    num_tries = 2 * plan.num_blocks * plan.tries_per_block + 1
    cold = seed(server, quiet_caller, small, num_tries)
    facts = {
        "url": server.url,
        "key": loud_caller.key,
        "base": base,
        "cold": seed(server, loud_caller, small, plan.num_cold),
        "load": plan.load,
    }
    tenant = Tenant(server.url, quiet_caller.key, base, poll_pauses=lambda: repeat(POLL_SECONDS))
    quiet = Quiet(tenant, small, iter(cold))
    alone, beside = Samples(), Samples()
    await quiet.try_once(Samples(), plan)  # warm
    async with loud_tenant(home, facts) as loud:
        for _ in range(plan.num_blocks):
            for _ in range(plan.tries_per_block):
                await quiet.try_once(alone, plan)
            async with loud.at_work():
                for _ in range(plan.tries_per_block):
                    await quiet.try_once(beside, plan)
    await tenant.aclose()
    return Figures(alone, beside, loud.answers, dict(tenant.answers))


@dataclass(frozen=True)
class Figures:
    alone: Samples
    beside: Samples
    loud: dict[str, int]
    quiet: dict[str, int]

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "what": name,
                "tries": len(self.beside.seconds[name]),
                "alone, ms": 1_000 * self.alone.median(name),
                "beside, ms": 1_000 * self.beside.median(name),
                "ratio": self.beside.median(name) / self.alone.median(name),
                "alone p95, ms": 1_000 * self.alone.p95(name),
                "beside p95, ms": 1_000 * self.beside.p95(name),
                "p95 ratio": self.beside.p95(name) / self.alone.p95(name),
            }
            for name in MEASURES
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    base = options.models / "shared-queues"
    make_base(base, plan.shape)
    program = (sys.executable, "-m", "benchmarks.slow_store", str(plan.latency_seconds))
    sizes = ("--memory-gib", "1.5", "--host-cache-gib", "0.125")
    with tempfile.TemporaryDirectory() as home:
        caches = {"LORAPLEX_DISK_CACHE_BYTES": str(128 << 20)}
        with serving(base, Path(home) / "data", *sizes, program=program, **caches) as server:
            figures = asyncio.run(measure(server, base.name, plan, Path(home)))
    print_report(
        "shared-queues",
        figures.rows(),
        cores=os.cpu_count(),
        load=plan.load,
        store_latency_seconds=plan.latency_seconds,
        num_cold_adapters=plan.num_cold,
        loud=figures.loud,
        quiet=figures.quiet,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
