"""ITL of other tenants while one large adapter is loaded from a slow store.

    make bench-adapter-load

Eight streams with small adapters decode all the time. In every second run a separate process
fetches an adapter of 500 MB from a store that responds after 5 s; the adapter is verified, read
into host memory and copied to the device. The other runs have no load. Runs alternate and have the
same duration. The figure is the ratio of the p99 gaps, the median over the pairs; the ratio pooled
over all runs is printed too.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from benchmarks.report import parse_options, print_report
from benchmarks.timed_engine import SMOKE_SHAPE, Order, TimedEngine, make_model, random_prompt
from safetensors.torch import load_file, save_file

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.adapters.store import object_key
from loraplex.adapters.store.local import LocalStore
from loraplex.api.bench.models import BaseShape, make_adapter
from loraplex.engine.messages import (
    AdapterFetched,
    AdapterWanted,
    DeleteAdapter,
    FromEngine,
    Prefetch,
)

LOAD_SHAPE = BaseShape(
    vocab_size=8_000,
    hidden_size=1_024,
    intermediate_size=2_816,
    num_layers=12,
    num_heads=16,
    num_kv_heads=4,
    max_model_len=1_536,
)
FETCHED_PATH = 5
"""Which argument of the fetching command is the path that it writes."""


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = LOAD_SHAPE
    large_rank: int = 570
    """500 MB in fp32."""
    num_streams: int = 8
    num_pairs: int = 15
    """The p99 of a run of some seconds varies by a third between equal runs."""
    latency_seconds: float = 5.0
    tail_seconds: float = 1.0
    """How long gaps are still counted after the adapter has come."""


SMOKE = Plan(SMOKE_SHAPE, large_rank=64, num_pairs=1, latency_seconds=0.2, tail_seconds=0.1)


@dataclass(frozen=True)
class Run:
    """The gaps of all streams in one run."""

    seconds: float
    gaps: list[float]

    @property
    def p99(self) -> float:
        return sorted(self.gaps)[int(0.99 * (len(self.gaps) - 1))]


class SlowlyFedEngine(TimedEngine):
    """Its large adapter is brought by another process."""

    def __init__(self, model: Path, directory: Path, **config: object) -> None:
        super().__init__(model, directory, **config)
        self.large: AdapterKey | None = None
        self.fetch: list[str] = []
        """The command that brings it, begun by `begin_load`; see `FETCHED_PATH`."""
        self._prepared: subprocess.Popen[str] | None = None
        self._fetching: subprocess.Popen[str] | None = None

    def step(self) -> None:
        super().step()
        if self._fetching is not None and self._fetching.poll() is not None:
            with self._fetching as ended:  # closes its pipes
                assert ended.returncode == 0
            self._fetching = None
            assert self.large is not None
            self.core.handle(AdapterFetched(self.large, (self.fetch[FETCHED_PATH],), Tier.STORE))

    def _take(self, message: FromEngine) -> None:
        if not (isinstance(message, AdapterWanted) and message.key == self.large):
            super()._take(message)

    def prepare_load(self) -> None:
        """Start the process and wait until it could begin."""
        Path(self.fetch[FETCHED_PATH]).unlink(missing_ok=True)
        self._prepared = subprocess.Popen(
            self.fetch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._prepared.stdout is not None
        assert self._prepared.stdout.readline()

    def begin_load(self) -> None:
        assert self.large is not None
        assert self._prepared is not None
        assert self._prepared.stdin is not None
        self.core.handle(Prefetch(self.large))
        self._prepared.stdin.write("go\n")
        self._prepared.stdin.flush()
        self._fetching, self._prepared = self._prepared, None

    def is_large_resident(self) -> bool:
        return any(
            entry.key == self.large and entry.tier is Tier.DEVICE
            for entry in self.core.stats().adapters
        )

    def drop_large(self) -> None:
        assert self.large is not None
        self.core.handle(DeleteAdapter(self.large))
        while self.large not in self.evicted:
            self.step()
        self.evicted.clear()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    with tempfile.TemporaryDirectory() as directory:
        size_bytes, loading, quiet = measure(model, plan, Path(directory))
    pairs = list(zip(loading, quiet, strict=True))
    rows = [
        {
            "pair": str(number),
            "seconds": load.seconds,
            "p99 alone, ms": 1_000 * alone.p99,
            "p99 beside the load, ms": 1_000 * load.p99,
            "ratio": load.p99 / alone.p99,
        }
        for number, (load, alone) in enumerate(pairs, 1)
    ]
    print_report(
        "adapter-load",
        rows,
        size_bytes=size_bytes,
        store_latency_seconds=plan.latency_seconds,
        p99_ratio=p99_ratio(loading, quiet),
        pooled_p99_ratio=pooled(loading).p99 / pooled(quiet).p99,
        median_gap_ratio=statistics.median(
            statistics.median(load.gaps) / statistics.median(alone.gaps) for load, alone in pairs
        ),
        requests_answered_differently=0,
    )
    return 0


def measure(
    model: Path, plan: Plan, directory: Path, *, device: str = "cpu"
) -> tuple[int, list[Run], list[Run]]:
    """The large block's size, the runs with a load, and those without."""
    engine = SlowlyFedEngine(
        model,
        directory,
        device=device,
        max_num_seqs=plan.num_streams,
        kv_cache_bytes=256 << 20,
        arena_bytes=640 << 20,
        host_cache_bytes=640 << 20,
    )
    small = [_add_small(engine, plan, directory, seed) for seed in range(plan.num_streams)]
    size_bytes = _prepare_large(engine, plan, directory)
    rng = Random(3)
    streams = _Streams(engine, plan, small, rng)
    streams.run_for(plan.tail_seconds)  # warm
    loading, quiet = [], []
    gc.disable()  # the engine's process collects garbage when it is idle
    for _ in range(plan.num_pairs):
        loading.append(streams.run_load())
        engine.drop_large()
        quiet.append(streams.run_for(loading[-1].seconds))
    gc.enable()
    engine.close()
    return size_bytes, loading, quiet


def p99_ratio(loading: Sequence[Run], quiet: Sequence[Run]) -> float:
    """The median over the pairs."""
    return statistics.median(
        load.p99 / alone.p99 for load, alone in zip(loading, quiet, strict=True)
    )


def pooled(runs: Sequence[Run]) -> Run:
    """All runs as one."""
    gaps = [gap for run in runs for gap in run.gaps]
    return Run(sum(run.seconds for run in runs), gaps)


class _Streams:
    """Endless decoding: whoever ends begins again."""

    def __init__(
        self, engine: SlowlyFedEngine, plan: Plan, adapters: list[AdapterKey], rng: Random
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._adapters = adapters
        self._rng = rng

    def run_for(self, seconds: float) -> Run:
        """Nothing else happens."""
        return self.run(lambda elapsed: elapsed > seconds)

    def run_load(self) -> Run:
        """From the prefetch until a little after the adapter is resident."""
        resident_at: list[float] = []

        def is_over(elapsed: float) -> bool:
            if not resident_at and self._engine.is_large_resident():
                resident_at.append(elapsed)
            return bool(resident_at) and elapsed > resident_at[0] + self._plan.tail_seconds

        self._engine.prepare_load()
        return self.run(is_over, begin=self._engine.begin_load)

    def run(
        self, is_over: Callable[[float], bool], begin: Callable[[], None] = lambda: None
    ) -> Run:
        """Gaps between the tokens of streams that are all decoding."""
        engine = self._engine
        ids = dict(
            zip(self._adapters, engine.send_all(map(self._order, self._adapters)), strict=True)
        )
        while any(not engine.answers[request_id].token_ids for request_id in ids.values()):
            engine.step()
        begin()
        begun_at = last = time.perf_counter()
        gaps: list[float] = []
        while not is_over(last - begun_at):
            engine.step()
            now = time.perf_counter()
            gaps += [now - last] * len(ids)
            last = now
            for adapter, request_id in ids.items():
                if not engine.is_open(request_id):
                    ids[adapter] = engine.send(self._order(adapter))
        for request_id in ids.values():
            engine.abort(request_id)
        engine.run()
        return Run(last - begun_at, gaps)

    def _order(self, adapter: AdapterKey) -> Order:
        room = self._plan.shape.max_model_len
        prompt = random_prompt(self._rng, self._plan.shape, 16)
        return Order(prompt, room - len(prompt), adapter.tenant_id, adapter)


def _add_small(engine: TimedEngine, plan: Plan, directory: Path, seed: int) -> AdapterKey:
    folder = directory / f"small-{seed}"
    make_adapter(folder, plan.shape, rank=8, seed=seed)
    return engine.add_adapter(folder, f"tenant-{seed}")


def _prepare_large(engine: SlowlyFedEngine, plan: Plan, directory: Path) -> int:
    """Put the large adapter into the store; the size of its object."""
    folder = directory / "large"
    make_adapter(folder, plan.shape, rank=plan.large_rank, seed=99)
    weights = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(torch.float32) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    block = directory / "large.block"
    report = engine.examine(folder, block)
    key = engine.large = AdapterKey("slow", report.digest)
    store = directory / "store"
    LocalStore(store).put_file(object_key(key), block, sha256=report.file_sha256)
    block.unlink()
    engine.fetch = [
        *(sys.executable, "-m", "benchmarks.slow_fetch"),
        *(str(store), object_key(key), str(directory / "fetched.block")),
        *(report.file_sha256, str(report.size_bytes), str(plan.latency_seconds)),
    ]
    return report.size_bytes


if __name__ == "__main__":
    sys.exit(main())
