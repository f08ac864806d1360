"""The borders between adapters and KV blocks: moved by the load, against fixed borders.

One is between KV cache and arena, the other one in host memory, under a small device.
The real scheduler, KV blocks, adapter manager and border on a virtual clock, without a model: steps
and loads take what a formula says, so a run gives the same figures each time. Three traffics on the
same memory: many adapters with short prompts; few adapters with long shared prefixes; both in turn.
Each is served with every fixed border and with the moving one, all with the same arrivals. The time
to first token counts after the first part of the run, in which the caches fill.

`make bench-border` prints a table, and finally one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import AdapterManager, Tier
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.layout import GiveBackBlocks, KvGroup, KvOperation, SwapIn, SwapOut
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.memory.border import Border
from loraplex.engine.memory.budget import Bounds
from loraplex.engine.memory.host_border import HostBorder
from loraplex.engine.memory.host_plan import SharedHostMemory
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.batch import ScheduledBatch
from loraplex.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from loraplex.engine.scheduling.step_costs import StepCosts
from support.manager import FakeArena, FakeBlock, FakeHost

P = ParamSpec("P")
T = TypeVar("T")

BLOCK_SIZE = 16
UNIT_BYTES = FakeArena.element_bytes
"""Stands for a MiB: the unit of all sizes here."""
TOTAL = 4096
BLOCK_UNITS = 2
"""16 tokens of a model with 8 billion parameters."""
ADAPTER_UNITS = 40
"""Rank 8 on all layers of such a model, in bf16."""
UNITS_PER_SECOND = 1000.0
"""Of the loads; under a border in host memory, from the disk alone."""
HOST_UNITS_PER_SECOND = 20000.0
"""Between host and device, under a border in host memory."""
SMALL_ARENA, SMALL_KV = 512, 1536
"""Of the device then."""
STEP_SECONDS, TOKEN_SECONDS, DECODE_SECONDS = 0.010, 40e-6, 100e-6
PARTS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Of the memory, what adapters have with each fixed border."""
START, HOST_START = 1 / 4, 1 / 2
"""Where the moving border begins, as the memory plan has it."""
LEAST, LEAST_KV = TOTAL // 16, TOTAL // 8
BOUNDS = Bounds(
    UNIT_BYTES * TOTAL, UNIT_BYTES * LEAST, UNIT_BYTES * LEAST_KV, UNIT_BYTES * TOTAL // 32
)
TICK_SECONDS = 0.005
WARM_UP = 1 / 4
"""The part of a run whose requests are not counted."""
OUTPUT_TOKENS = 32
MAX_RATIO = 1.01
"""Of the moving border's mean time to first token, to that of the best fixed one."""


class Traffic(NamedTuple):
    """Requests at random times, each for an adapter and a shared prefix by Zipf's law."""

    rate: float
    """Requests per second."""
    num_adapters: int
    num_prefixes: int
    """0: no prompt begins like another."""
    prefix_tokens: int
    own_tokens: int


MANY_ADAPTERS = Traffic(8.0, 150, 0, 0, 64)
LONG_PREFIXES = Traffic(5.0, 4, 60, 1024, 32)
TRAFFICS: dict[str, tuple[Traffic, ...]] = {
    "many adapters": (MANY_ADAPTERS,),
    "long prefixes": (LONG_PREFIXES,),
    "in turn": (MANY_ADAPTERS, LONG_PREFIXES),
}


class Order(NamedTuple):
    """One request and when it comes."""

    at: float
    adapter: AdapterKey
    prompt: list[int]


def draw_orders(
    traffics: Sequence[Traffic], seconds: float, turn_seconds: float, seed: int
) -> Iterator[Order]:
    """The arrivals of a run; with several traffics, each for `turn_seconds` in turn."""
    rng = random.Random(seed)
    now, number = 0.0, 0
    while True:
        index = int(now / turn_seconds) % len(traffics)
        traffic = traffics[index]
        now += rng.expovariate(traffic.rate)
        if now >= seconds:
            return
        number += 1
        adapter = _zipf(rng, traffic.num_adapters)
        key = AdapterKey("tenant", f"sha256:{index}-{adapter}")
        prefix: list[int] = []
        if traffic.num_prefixes:
            prefix = [1 + _zipf(rng, traffic.num_prefixes)] * traffic.prefix_tokens
        yield Order(now, key, [*prefix, *[1000 + number] * traffic.own_tokens])


def _zipf(rng: random.Random, count: int) -> int:
    weights = list(accumulate(1 / rank for rank in range(1, count + 1)))
    return rng.choices(range(count), cum_weights=weights)[0]


class TimedLoaders:
    """One thread that copies at a fixed rate, on the virtual clock."""

    def __init__(self, clock: Callable[[], float], host_rate: float) -> None:
        """`host_rate`: units per second to the device."""
        self._clock = clock
        self._host_rate = host_rate
        self._free_at = 0.0
        self._jobs: list[tuple[float, Future[Any], Callable[[], Any]]] = []

    def submit(
        self, num_bytes: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        future: Future[T] = Future()
        start = max(self._clock(), self._free_at)
        is_copy = getattr(fn, "__name__", "") == "copy_into"
        rate = self._host_rate if is_copy else UNITS_PER_SECOND
        self._free_at = start + num_bytes / UNIT_BYTES / rate
        self._jobs.append((self._free_at, future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        """Run what has ended by now."""
        while self._jobs and self._jobs[0][0] <= self._clock():
            _, future, job = self._jobs.pop(0)
            future.set_result(job())


class Simulation:
    """One engine without a model."""

    def __init__(
        self,
        arena: FakeArena,
        host: FakeHost,
        group: KvGroup,
        *,
        num_slots: int = 0,
        host_rate: float = UNITS_PER_SECOND,
    ) -> None:
        """`num_slots`: of KV blocks on the host."""
        self.now = 0.0
        self.loaders = TimedLoaders(self.clock, host_rate)
        self.manager: AdapterManager[FakeBlock] = AdapterManager(
            arena=arena, host=host, loaders=self.loaders, clock=self.clock, num_soon=64
        )
        self._files = host.files
        self.kv = KvBlocks([group], BLOCK_SIZE, prefix_secret=bytes(32), num_swap_slots=[num_slots])
        self.costs = StepCosts()
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=64,
                max_num_batched_tokens=1024,
                max_model_len=4096,
                block_size=BLOCK_SIZE,
                max_queued=10**6,
                max_queued_per_tenant=10**6,
                kv_block_bytes=(UNIT_BYTES * BLOCK_UNITS,),
            ),
            kv=self.kv,
            manager=self.manager,
            costs=self.costs,
            clock=self.clock,
        )
        self.border: Border | HostBorder | None = None
        self.num_given_back = 0
        """Blocks."""
        self.first_token_seconds: dict[str, float] = {}
        self._sent: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    def run(self, orders: Iterator[Order]) -> None:
        """Serve all orders."""
        order = next(orders, None)
        while order or self.scheduler.has_requests:
            while order and order.at <= self.now:
                self._send(order)
                order = next(orders, None)
            if order and not self.scheduler.has_requests and not self.manager.has_pending_work:
                self.now = max(self.now, order.at)
                continue
            self._step()

    def _send(self, order: Order) -> None:
        request_id = f"r{len(self._sent)}"
        self._sent[request_id] = order.at
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        key = order.adapter
        submitted = GenerationRequest(request_id, key.tenant_id, order.prompt, sampling, key)
        namespace = CacheNamespace(key.tenant_id, "runtime", key)
        self.scheduler.add(Request(submitted, namespace, 0, order.at, None))

    def _step(self) -> None:
        self.loaders.run()
        self.manager.poll()
        for key in self.manager.fetches.take_wanted():
            path = Path(key.digest)
            self._files[path] = ADAPTER_UNITS
            self.manager.fetched(key, [path], Tier.DISK)
        self.manager.fetches.take_read()
        if self.border:
            self.border.poll()
        batch = self.scheduler.schedule().batch
        self._give_back(self.kv.operations.take() if batch is None else batch.operations)
        if batch is None:
            self.now += TICK_SECONDS
            return
        shape = batch.shape
        seconds = STEP_SECONDS + TOKEN_SECONDS * shape.num_prefill_tokens
        seconds += DECODE_SECONDS * shape.num_decodes
        num_swapped = sum(
            len(operation.block_ids)
            for operation in batch.operations
            if isinstance(operation, SwapIn | SwapOut)
        )
        swap_seconds = num_swapped * BLOCK_UNITS / HOST_UNITS_PER_SECOND
        self.now += seconds + swap_seconds
        self._process(batch)
        self.scheduler.observe(batch, seconds + swap_seconds, swap_seconds)

    def _give_back(self, operations: Iterable[KvOperation]) -> None:
        self.num_given_back += sum(
            len(operation.block_ids)
            for operation in operations
            if isinstance(operation, GiveBackBlocks)
        )

    def _process(self, batch: ScheduledBatch) -> None:
        ended = []
        self.scheduler.note_launch(batch.sequences)
        for sequence in batch.sequences:
            request = sequence.request
            if sequence.samples:
                request_id = request.request_id
                self.first_token_seconds.setdefault(request_id, self.now - self._sent[request_id])
            sampled = [len(request.token_ids)] if sequence.samples else []
            self.scheduler.take([(sequence, sampled, 0)])
            if sequence.samples and len(request.token_ids) == request.max_num_tokens:
                ended.append(request)
        for request in ended:
            self.scheduler.finish(request)
        self.scheduler.note_read()

    def mean_first_token(self, after: float) -> float:
        """Seconds, over the requests that came after this time."""
        return statistics.mean(
            seconds
            for request_id, seconds in self.first_token_seconds.items()
            if self._sent[request_id] >= after
        )


def divide_device(part: float, *, moves: bool) -> Simulation:
    """With a border at this part of the device's memory; the host has all adapters."""
    arena_units = int(TOTAL * part)
    num_blocks = (TOTAL - arena_units) // BLOCK_UNITS
    group = KvGroup(
        (0,),
        None,
        0,
        num_blocks + 1,
        num_more=(arena_units - LEAST) // BLOCK_UNITS if moves else 0,
        num_less=num_blocks - LEAST_KV // BLOCK_UNITS if moves else 0,
    )
    arena = FakeArena(arena_units, reserved=TOTAL - LEAST_KV if moves else 0)
    simulation = Simulation(arena, FakeHost(100 * TOTAL), group)
    if moves:
        simulation.border = Border(
            BOUNDS,
            kv=simulation.kv,
            block_bytes=UNIT_BYTES * BLOCK_UNITS,
            block_size=BLOCK_SIZE,
            manager=simulation.manager,
            scheduler=simulation.scheduler,
            costs=simulation.costs,
            clock=simulation.clock,
            execute=lambda operations: None,
            num_given_back=lambda: simulation.num_given_back,
        )
    return simulation


def divide_host(part: float, *, moves: bool) -> Simulation:
    """With a border at this part of the host's memory, under a small device."""
    host = FakeHost(int(TOTAL * part))
    shared = SharedHostMemory(BOUNDS, 0, UNIT_BYTES * BLOCK_UNITS)
    simulation = Simulation(
        FakeArena(SMALL_ARENA),
        host,
        KvGroup((0,), None, 0, SMALL_KV // BLOCK_UNITS + 1),
        num_slots=shared.num_slots if moves else (TOTAL - host.capacity) // BLOCK_UNITS,
        host_rate=HOST_UNITS_PER_SECOND,
    )
    if moves:
        host.reserved = BOUNDS.most_adapters // UNIT_BYTES
        simulation.border = HostBorder(
            shared,
            adapter_bytes=host.capacity_bytes,
            kv=simulation.kv,
            block_size=BLOCK_SIZE,
            manager=simulation.manager,
            costs=simulation.costs,
            clock=simulation.clock,
        )
    return simulation


class Divided(NamedTuple):
    """A memory with a border."""

    divide: Callable[..., Simulation]
    start: float
    """Where the moving border begins."""


MEMORIES = {"device": Divided(divide_device, START), "host": Divided(divide_host, HOST_START)}


def measure(
    memory: Divided, traffics: Sequence[Traffic], seconds: float, turn_seconds: float, seed: int
) -> dict[str, Any]:
    """The mean time to first token in milliseconds, by border."""

    def serve(part: float, *, moves: bool) -> tuple[float, Simulation]:
        simulation = memory.divide(part, moves=moves)
        simulation.run(draw_orders(traffics, seconds, turn_seconds, seed))
        return 1000 * simulation.mean_first_token(WARM_UP * seconds), simulation

    fixed = {f"{part:.4g}": serve(part, moves=False)[0] for part in PARTS}
    moving, simulation = serve(memory.start, moves=True)
    assert simulation.border
    best = min(fixed.values())
    return {
        "fixed_ms": {part: round(value, 1) for part, value in fixed.items()},
        "moving_ms": round(moving, 1),
        "best_fixed_ms": round(best, 1),
        "ratio": round(moving / best, 3),
        "moves": simulation.border.num_moves,
        "loads": simulation.manager.num_loads,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0, help="of each run, simulated")
    parser.add_argument("--turn", type=float, default=50.0, help="seconds of each traffic in turn")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    print(f"mean TTFT in ms by the adapters' part of the memory; {args.seconds:.0f} s each")
    print("traffic".ljust(22), *(f"{part:>7.4g}" for part in PARTS), " moving  ratio  moves")
    rows: dict[str, dict[str, Any]] = {}
    for memory_name, memory in MEMORIES.items():
        rows[memory_name] = {}
        for name, traffics in TRAFFICS.items():
            row = measure(memory, traffics, args.seconds, args.turn, args.seed)
            rows[memory_name][name] = row
            fixed = (f"{value:7.1f}" for value in row["fixed_ms"].values())
            figures = f"{row['moving_ms']:7.1f}  {row['ratio']:.3f}  {row['moves']:5}"
            print(f"{memory_name}, {name}".ljust(22), *fixed, figures, flush=True)
    is_met = all(row["ratio"] <= MAX_RATIO for own in rows.values() for row in own.values())
    print(json.dumps({"seconds": args.seconds, "seed": args.seed, "rows": rows, "met": is_met}))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
