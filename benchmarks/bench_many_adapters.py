"""Throughput with 200 active of 1,000 adapters (Zipf), relative to 5; and the catalog's latency.

    make bench-many-adapters

Both variants use the same engine, the same prompts and the same number of tokens. Runs come in
pairs, one of each variant, and a ratio is the median over the pairs, which is least affected by a
machine whose speed changes. It is measured with an arena for all active adapters, and with one for
a sixth of them, where they move between host memory and the arena. A repeated prompt has other
neighbours in its batch: its answer may differ where rounding decides between nearly equal tokens;
otherwise the benchmark fails. More adapters in a batch are more bytes to read in any system: the
ratio of bytes is printed next to the measured one. The catalog is measured on SQLite with 100 to
10,000 adapters of one tenant.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random

from benchmarks.report import Row, parse_options, print_report
from benchmarks.speculation_arms import NEAR_TIE
from benchmarks.timed_engine import SMOKE_SHAPE, Order, TimedEngine, make_model, random_prompt

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import BaseShape, make_adapter
from loraplex.platform.adapters import registry, service
from loraplex.platform.adapters.listing import AdapterQuery, list_summaries
from loraplex.platform.adapters.service import NewVersion
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants import service as tenants
from support.greedy import parts_at_near_tie

BASE_ID = "bench"
BATCH = 16
MANY_SHAPE = BaseShape(
    vocab_size=8_000,
    hidden_size=2_048,
    intermediate_size=5_632,
    num_layers=6,
    num_heads=32,
    num_kv_heads=4,
    max_model_len=512,
)
"""The layers of a 1.1 B Llama, six of them: an adapter is to its base what it is in earnest."""
IDLE_SECONDS = 0.001


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MANY_SHAPE
    rank: int = 8
    num_active: int = 200
    num_few: int = 5
    rooms: tuple[int, ...] = (200, 33)
    """Adapters that the arena holds."""
    num_requests: int = 96
    num_prompt_tokens: int = 32
    num_output_tokens: int = 32
    num_runs: int = 8
    catalog_sizes: tuple[int, ...] = (100, 1_000, 10_000)
    num_catalog_calls: int = 50


SMOKE = Plan(
    SMOKE_SHAPE,
    num_active=8,
    num_few=2,
    rooms=(8, 4),
    num_requests=24,
    num_output_tokens=4,
    num_runs=1,
    catalog_sizes=(2, 8),
    num_catalog_calls=2,
)


@dataclass(frozen=True)
class Run:
    """One arm, once."""

    tokens_per_second: float
    """Of the time in which requests wait."""
    adapters_per_step: float
    """Different adapters in the batch, mean over the steps of that time."""
    asked: Sequence[tuple[list[int], AdapterKey]]
    """Each request's prompt and adapter: the same in every run of an arm."""
    answers: Sequence[list[int]]


@dataclass(frozen=True)
class Arms:
    """What was measured with one size of the arena."""

    room: int
    few: Sequence[Run]
    many: Sequence[Run]
    num_loads: int
    num_evictions: int
    num_different: int
    """Answers that differ between two runs of an arm beyond near ties."""
    num_near_ties: int

    @property
    def ratio(self) -> float:
        """Throughput with many adapters over that with few; median of the pairs."""
        return statistics.median(self.pair_ratios)

    @property
    def pair_ratios(self) -> list[float]:
        pairs = zip(self.few, self.many, strict=True)
        return [many.tokens_per_second / few.tokens_per_second for few, many in pairs]

    def bytes_ratio(self, plan: Plan) -> float:
        """What a step with few has to read over what one with many has to."""
        few, many = mean_adapters(self.few), mean_adapters(self.many)
        return _bytes(plan, few) / _bytes(plan, many)

    def rows(self, plan: Plan) -> list[Row]:
        return [
            {
                "room for": self.room,
                "adapters": adapters,
                "tokens/s": median(runs),
                "in a batch": mean_adapters(runs),
                "loads": self.num_loads,
            }
            for adapters, runs in ((plan.num_few, self.few), (plan.num_active, self.many))
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    with tempfile.TemporaryDirectory() as directory:
        arms = [measure(model, plan, room, Path(directory)) for room in plan.rooms]
        catalog = [measure_catalog(plan, size, Path(directory)) for size in plan.catalog_sizes]
    num_different = sum(arm.num_different for arm in arms)
    print_report(
        "many-adapters",
        [row for arm in arms for row in arm.rows(plan)],
        throughput_ratio=arms[0].ratio,
        paged_throughput_ratio=arms[-1].ratio,
        pair_ratios={arm.room: arm.pair_ratios for arm in arms},
        bytes_ratio=arms[0].bytes_ratio(plan),
        near_ties=sum(arm.num_near_ties for arm in arms),
        requests_answered_differently=num_different,
        catalog=catalog,
        num_registered=max(plan.catalog_sizes),
    )
    return 1 if num_different else 0


def measure(model: Path, plan: Plan, room: int, directory: Path) -> Arms:
    """Both arms, alternating, on one engine whose arena holds `room` adapters."""
    element_bytes, per_adapter = 4, plan.rank * _sum_of_features(plan.shape)
    folder = directory / f"room-{room}"
    folder.mkdir()
    engine = TimedEngine(
        model,
        folder,
        max_num_seqs=BATCH,
        kv_cache_bytes=256 << 20,
        arena_bytes=int(1.02 * element_bytes * per_adapter * room),
        host_cache_bytes=int(1.02 * element_bytes * per_adapter * plan.num_active),
    )
    keys = [_add(engine, plan, folder, seed) for seed in range(plan.num_active)]
    engine.warm_up()
    few: list[Run] = []
    many: list[Run] = []
    for turn in range(plan.num_runs + 1):
        arms = [(few, keys[: plan.num_few]), (many, keys)]
        for runs, asked in arms if turn % 2 else reversed(arms):
            run = serve(engine, plan, asked)
            if turn:  # the first turn brings the adapters to memory
                runs.append(run)
    stats = engine.core.stats()
    parted = [*parted_at_near_tie(engine, few), *parted_at_near_tie(engine, many)]
    engine.close()
    return Arms(
        room,
        few,
        many,
        stats.num_adapter_loads,
        stats.num_adapter_evictions,
        num_different=parted.count(False),
        num_near_ties=parted.count(True),
    )


def serve(engine: TimedEngine, plan: Plan, keys: Sequence[AdapterKey]) -> Run:
    """All requests at once, their adapters drawn by Zipf's law.

    Throughput is that of the time in which some wait: how the last ones happen to end together or
    one after another says nothing of a load that goes on.
    """
    rng = Random(2)
    weights = [1 / rank for rank in range(1, len(keys) + 1)]
    asked: dict[str, tuple[list[int], AdapterKey]] = {}
    num_steps = num_adapters = num_tokens = 0
    seconds = 0.0
    begun_at = time.perf_counter()
    for _ in range(plan.num_requests):
        key = rng.choices(keys, weights)[0]
        prompt = random_prompt(rng, plan.shape, plan.num_prompt_tokens)
        order = Order(prompt, plan.num_output_tokens, key.tenant_id, key)
        asked[engine.send(order)] = prompt, key
    num_before = engine.core.stats().num_steps
    while engine.num_open:
        engine.step()
        stats = engine.core.stats()
        if stats.num_steps == num_before:
            time.sleep(IDLE_SECONDS)  # everything waits for a load
            continue
        num_before = stats.num_steps
        if stats.num_waiting:
            seconds = time.perf_counter() - begun_at
            num_steps += 1
            num_adapters += sum(entry.num_leases > 0 for entry in stats.adapters)
            num_tokens = sum(len(engine.answers[request].token_ids) for request in asked)
    return Run(
        num_tokens / seconds,
        num_adapters / num_steps,
        list(asked.values()),
        engine.tokens(asked),
    )


def measure_catalog(plan: Plan, size: int, directory: Path) -> dict[str, object]:
    """Milliseconds of one call with so many adapters registered; medians."""
    database = Database(f"sqlite:///{directory / f'catalog-{size}.db'}")
    database.upgrade()
    with database.platform_transaction() as everything:
        tenant_id = tenants.create_tenant(everything, "bench").id
    with database.transaction(tenant_id) as session:
        for number in range(size):
            _register(session, f"adapter-{number}")
    name = registry.parse_model_name(f"adapter-{size // 2}")
    numbers = iter(range(size, size + plan.num_catalog_calls))
    with database.transaction(tenant_id, read_only=True) as session:
        half = list_summaries(session, AdapterQuery(), limit=size // 2)[-1].cursor

    def resolve() -> None:
        with database.transaction(tenant_id, read_only=True) as session:
            registry.resolve(session, name, tenant_slug="bench").of("r", base_id=BASE_ID)

    def list_page() -> None:
        with database.transaction(tenant_id, read_only=True) as session:
            list_summaries(session, AdapterQuery(), after=half, limit=50)

    def register() -> None:
        with database.transaction(tenant_id) as session:
            _register(session, f"adapter-{next(numbers)}")

    timed = {
        call.__name__: 1_000 * statistics.median(_time(call, plan.num_catalog_calls))
        for call in (resolve, list_page, register)
    }
    database.close()
    return {"adapters": size, **{f"{name}_ms": value for name, value in timed.items()}}


def median(runs: Sequence[Run]) -> float:
    return statistics.median(run.tokens_per_second for run in runs)


def mean_adapters(runs: Sequence[Run]) -> float:
    return statistics.fmean(run.adapters_per_step for run in runs)


def parted_at_near_tie(engine: TimedEngine, runs: Sequence[Run]) -> list[bool]:
    """For each answer that is not what the first of an arm's runs gave: whether rounding may have
    parted the two. Neither is known to be right, so neither may be likelier by more."""
    first = runs[0]
    return [
        all(
            parts_at_near_tie(engine, *asked, expected=left, actual=right, gap=NEAR_TIE)
            for left, right in permutations(answers)
        )
        for run in runs[1:]
        for asked, *answers in zip(first.asked, first.answers, run.answers, strict=True)
        if answers[0] != answers[1]
    ]


def _time(call: Callable[[], None], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        begun_at = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun_at)
    return seconds


def _register(session: TenantSession, name: str) -> None:
    version, _ = service.create_version(
        session,
        NewVersion(
            adapter_name=name,
            digest=f"sha256:{name.encode().hex():0>64}",
            base_id=BASE_ID,
            object_sha256="0" * 64,
            size_bytes=1,
            intake_report={},
        ),
    )
    service.begin_attestation(session, version.id)
    service.mark_ready(session, version.id, attestation_report={})


def _add(engine: TimedEngine, plan: Plan, directory: Path, seed: int) -> AdapterKey:
    folder = directory / f"adapter-{seed}"
    make_adapter(folder, plan.shape, rank=plan.rank, seed=seed)
    return engine.add_adapter(folder, f"tenant-{seed % 20}")


def _sum_of_features(shape: BaseShape) -> int:
    """Of all linear layers, inputs and outputs: the size of an adapter of rank 1."""
    kv = shape.hidden_size // shape.num_heads * shape.num_kv_heads
    attention = 2 * 2 * shape.hidden_size + 2 * (shape.hidden_size + kv)
    return shape.num_layers * (attention + 3 * (shape.hidden_size + shape.intermediate_size))


def _bytes(plan: Plan, num_adapters: float) -> float:
    """What a step reads: the base's linear layers and head, and its adapters."""
    shape = plan.shape
    kv = shape.hidden_size // shape.num_heads * shape.num_kv_heads
    attention = 2 * shape.hidden_size**2 + 2 * shape.hidden_size * kv
    layer = attention + 3 * shape.hidden_size * shape.intermediate_size
    base = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
    return base + num_adapters * plan.rank * _sum_of_features(shape)


if __name__ == "__main__":
    sys.exit(main())
