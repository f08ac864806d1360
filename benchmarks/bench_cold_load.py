"""How a cold adapter's TTFT is divided, and what overlapping its stages could save.

    make bench-cold-load

A request for an adapter that only the store has waits for four stages: the block is fetched to the
disk, read into host memory, copied to the device, and then the first chunk of the prompt is
computed. Each is timed alone, and the fastest of the tries counts, because other work on the
machine delays the others. The store is a folder, so a fetch takes the time of the verification and
the disk, without a network. The second table puts the measured rates of fetches and reads beside a
store's network, PCIe and an H200 (see `Store` and the constants below it), for larger bases.

The columns that end with `saves` are upper bounds. Two stages that run at the same time, layer by
layer, save at most the shorter one but for one layer of it.

- `by layers saves`: the chunk runs during the whole load, even before the block's SHA-256 is known.
- `after the fetch saves`: the chunk runs while the verified block is read and copied.
- `read while fetched saves`: the block is read while it is fetched; the chunk runs afterwards.
- `from the host saves`: the chunk runs during the copy of an adapter that is in host memory. The
  share is of such a request's TTFT, which has no fetch and no read.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.report import Row, parse_options, print_report
from benchmarks.timed_engine import SMOKE_SHAPE, Order, TimedEngine, make_model, random_prompt

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.store import object_key
from loraplex.adapters.store.local import LocalStore
from loraplex.api.bench.models import BaseShape, make_adapter
from loraplex.engine.config import EngineConfig
from loraplex.engine.messages import DeleteAdapter

MEASURED = BaseShape(
    vocab_size=8_000,
    hidden_size=1_024,
    intermediate_size=2_816,
    num_layers=12,
    num_heads=16,
    num_kv_heads=4,
    max_model_len=1_536,
)
LLAMA_8B = BaseShape(
    vocab_size=128_256,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
)
LLAMA_70B = BaseShape(
    vocab_size=128_256,
    hidden_size=8_192,
    intermediate_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
)


@dataclass(frozen=True)
class Store:
    """The network between a store and its fetcher."""

    first_byte_seconds: float = 0.03
    bytes_per_second: float = 350e6
    """What one boto3 connection reaches without a network."""


PCIE_BYTES_PER_SECOND = 55e9
"""From page-locked memory, fifth generation, 16 lanes."""
FLOPS_PER_SECOND = 600e12
"""Of an H200 in the matmuls of a prompt in bf16: 0.6 of its peak."""
ELEMENT_BYTES = 2
"""bf16."""


@dataclass(frozen=True)
class Plan:
    shape: BaseShape = MEASURED
    ranks: Sequence[int] = (16, 64)
    chunks: Sequence[int] = (64, 256)
    """Tokens of the first chunk."""
    num_tries: int = 5


SMOKE = Plan(SMOKE_SHAPE, ranks=(4, 8), chunks=(16,), num_tries=1)


@dataclass(frozen=True)
class ColdStart:
    """The stages of one request's TTFT, in seconds."""

    num_layers: int
    fetch: float
    read: float
    copy: float
    chunk: float

    @property
    def ttft(self) -> float:
        return self.fetch + self.read + self.copy + self.chunk

    def row(self, **case: object) -> Row:
        load, ttft = self.fetch + self.read + self.copy, self.ttft
        return {
            **case,
            "fetch, ms": 1_000 * self.fetch,
            "read, ms": 1_000 * self.read,
            "copy, ms": 1_000 * self.copy,
            "chunk, ms": 1_000 * self.chunk,
            "by layers saves": self._overlap(load, self.chunk) / ttft,
            "after the fetch saves": self._overlap(self.read + self.copy, self.chunk) / ttft,
            "read while fetched saves": self._overlap(self.fetch, self.read) / ttft,
            "from the host saves": self._overlap(self.copy, self.chunk) / (self.copy + self.chunk),
        }

    def _overlap(self, one: float, other: float) -> float:
        """Seconds that two stages save which overlap but for one layer."""
        return min(one, other) * (1 - 1 / self.num_layers)


@dataclass(frozen=True)
class Rates:
    """Bytes per second of this machine's stages."""

    fetch: float
    read: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    plan = SMOKE if options.is_smoke else Plan()
    model = make_model(options.models, plan.shape)
    with tempfile.TemporaryDirectory() as directory:
        rows, rates = measure(model, plan, Path(directory))
    print_report(
        "cold-load",
        rows,
        ("on_an_h200", list(estimates(rates, plan.ranks))),
        fetch_megabytes_per_second=rates.fetch / 1e6,
        read_megabytes_per_second=rates.read / 1e6,
    )
    return 0


def measure(model: Path, plan: Plan, directory: Path) -> tuple[list[Row], Rates]:
    """A row for each rank and chunk on this machine, and the rates of the largest adapter."""
    engine = TimedEngine(
        model,
        directory,
        dtype="bfloat16",  # adapters keep their type, as on a GPU
        max_num_seqs=1,
        kv_cache_bytes=256 << 20,
        arena_bytes=512 << 20,
        host_cache_bytes=512 << 20,
    )
    rows = []
    for rank in plan.ranks:
        cold = _ColdAdapter(engine, plan.shape, rank, directory)
        tries = [cold.load() for _ in range(plan.num_tries + 1)][1:]  # the first one warms
        fetch, read, copy = map(min, zip(*tries, strict=True))
        rates = Rates(cold.num_bytes / fetch, cold.num_bytes / read)
        for num_tokens in plan.chunks:
            chunk = min(cold.compute(num_tokens) for _ in range(plan.num_tries))
            start = ColdStart(plan.shape.num_layers, fetch, read, copy, chunk)
            rows.append(start.row(rank=rank, MB=cold.num_bytes / 1e6, tokens=num_tokens))
    engine.close()
    return rows, rates


def estimates(rates: Rates, ranks: Sequence[int]) -> Iterator[Row]:
    """The same on an H200: bf16 adapters on every linear layer, and a full chunk."""
    for name, shape in (("8B", LLAMA_8B), ("70B", LLAMA_70B)):
        num_tokens = EngineConfig(name).max_num_batched_tokens
        chunk = 2 * linear_parameters(shape) * num_tokens / FLOPS_PER_SECOND
        for rank in ranks:
            num_bytes = rank * elements_per_rank(shape) * ELEMENT_BYTES
            start = ColdStart(
                shape.num_layers,
                fetch_seconds(num_bytes, Store(), rates),
                num_bytes / rates.read,
                num_bytes / PCIE_BYTES_PER_SECOND,
                chunk,
            )
            yield start.row(base=name, rank=rank, MB=num_bytes / 1e6)


def fetch_seconds(num_bytes: float, store: Store, rates: Rates) -> float:
    """One thread receives, verifies and writes."""
    receiving = store.first_byte_seconds + num_bytes / store.bytes_per_second
    return receiving + num_bytes / rates.fetch


def linear_layers(shape: BaseShape) -> Iterator[tuple[int, int]]:
    """Inputs and outputs of one decoder layer's linear layers."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_heads * shape.num_kv_heads
    yield from [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
    yield from [(hidden, inner), (hidden, inner), (inner, hidden)]


def linear_parameters(shape: BaseShape) -> int:
    return shape.num_layers * sum(inputs * outputs for inputs, outputs in linear_layers(shape))


def elements_per_rank(shape: BaseShape) -> int:
    """Of an adapter on every linear layer of the decoder."""
    return shape.num_layers * sum(inputs + outputs for inputs, outputs in linear_layers(shape))


class _ColdAdapter:
    """An adapter in a store, loaded as often as wanted."""

    def __init__(self, engine: TimedEngine, shape: BaseShape, rank: int, directory: Path) -> None:
        folder, block = directory / f"rank-{rank}", directory / f"rank-{rank}.block"
        make_adapter(folder, shape, rank=rank, seed=rank)
        report = engine.examine(folder, block)
        self._engine = engine
        self._shape = shape
        self._rng = Random(rank)
        self._key = AdapterKey("cold", report.digest)
        self._sha256 = report.file_sha256
        self._fetched = directory / f"rank-{rank}.fetched"
        self._store = LocalStore(directory / "store")
        self._store.put_file(object_key(self._key), block, sha256=self._sha256)
        block.unlink()
        engine.paths[self._key] = self._fetched
        self.num_bytes = report.size_bytes

    def load(self) -> tuple[float, float, float]:
        """Seconds of the fetch, the read and the copy. Afterwards the adapter is resident."""
        self._drop()
        begun_at = time.perf_counter()
        self._store.fetch_file(
            object_key(self._key), self._fetched, sha256=self._sha256, size_bytes=self.num_bytes
        )
        fetch = time.perf_counter() - begun_at
        before = self._stage_seconds()
        self.compute(1)
        read, copy = (
            after - earlier for after, earlier in zip(self._stage_seconds(), before, strict=True)
        )
        return fetch, read, copy

    def compute(self, num_tokens: int) -> float:
        """Seconds until the first token of a new prompt."""
        prompt = random_prompt(self._rng, self._shape, num_tokens)
        request_id = self._engine.send(Order(prompt, 1, "cold", self._key))
        self._engine.run()
        return self._engine.timing(request_id).ttft_seconds

    def _drop(self) -> None:
        self._engine.core.handle(DeleteAdapter(self._key))
        while self._key not in self._engine.evicted:
            self._engine.step()
        self._engine.evicted.clear()

    def _stage_seconds(self) -> tuple[float, float]:
        """Of all reads and copies so far."""
        seconds = self._engine.core.stats().adapter_tiers.load_seconds
        return seconds["read"].sum, seconds["copy"].sum


if __name__ == "__main__":
    sys.exit(main())
