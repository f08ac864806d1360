"""The scheduler's decisions, without a model: a fake device computes whatever was scheduled."""

from __future__ import annotations

import random

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.residency import Failure, Lease, Tier
from loraplex.engine.batch import ScheduledBatch
from loraplex.engine.block_pool import BlockPool
from loraplex.engine.errors import PromptTooLong
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.prefix_cache import CacheNamespace, PrefixCache
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduler import Scheduler, SchedulerLimits

BLOCK = 4


class FakeResidency:
    """Adapters that are resident because the test says so."""

    def __init__(self) -> None:
        self.resident: set[AdapterKey] = set()
        self.failures: dict[AdapterKey, Failure] = {}
        self.leases: dict[str, Lease] = {}
        self.requested: list[AdapterKey] = []

    def request(self, key: AdapterKey) -> None:
        self.requested.append(key)

    def acquire(self, key: AdapterKey, request_id: str) -> Lease | None:
        if key not in self.resident:
            return None
        return self.leases.setdefault(request_id, Lease(key, request_id, hash(key) % 7, 1))

    def release(self, request_id: str) -> None:
        self.leases.pop(request_id, None)

    def failure(self, key: AdapterKey) -> Failure | None:
        return self.failures.get(key)

    def loaded_from(self, key: AdapterKey) -> Tier | None:
        return Tier.DISK


class Bench:
    """A scheduler with a pool, and a device that draws token 0 for whatever samples."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        budget: int = 32,
        max_num_seqs: int = 8,
        prefix_caching: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.residency = FakeResidency()
        self.now = 0.0
        cache = PrefixCache(self.pool, BLOCK, secret=bytes(32)) if prefix_caching else None
        self.limits = SchedulerLimits(max_num_seqs, budget, 10_000, BLOCK)
        self.scheduler = Scheduler(
            self.limits,
            pool=self.pool,
            prefix_cache=cache,
            residency=self.residency,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        self.finished: dict[str, int] = {}

    def add(
        self,
        name: str,
        prompt: int | list[int],
        max_tokens: int = 1,
        adapter: AdapterKey | None = None,
        tier: Tier | None = None,
    ) -> Request:
        tokens = [1] * prompt if isinstance(prompt, int) else prompt
        submitted = GenerationRequest(
            name, "acme", tokens, SamplingParams(max_tokens=max_tokens), adapter
        )
        namespace = CacheNamespace("acme", "runtime", adapter)
        request = Request(submitted, namespace, 0, self.now, tier)
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduledBatch | None:
        """Schedule, check what must always hold, and compute."""
        batch, _, failed = self.scheduler.schedule()
        self.check(batch)
        for request, _ in failed:
            self.finished[request.request_id] = -1
        for sequence in batch.sequences if batch else ():
            self.scheduler.advance(sequence)
            request = sequence.request
            if request.num_computed_tokens == len(request.token_ids):
                request.token_ids.append(0)
                if request.num_generated_tokens == request.submitted.sampling.max_tokens:
                    self.scheduler.finish(request)
                    self.finished[request.request_id] = request.num_generated_tokens
        self.pool.check_integrity()
        return batch

    def check(self, batch: ScheduledBatch | None) -> None:
        if batch is None:
            return
        assert 0 < batch.num_tokens <= self.limits.max_num_batched_tokens
        assert len(batch.sequences) <= self.limits.max_num_seqs
        kinds = [sequence.is_decode for sequence in batch.sequences]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        rows = [s.request.lease.row if s.request.lease else -1 for s in batch.sequences]
        prefills = rows[sum(kinds) :]
        assert prefills == sorted(prefills), "prefills are grouped by adapter"
        for sequence in batch.sequences:
            request = sequence.request
            assert sequence.context_len <= len(request.token_ids)
            assert sequence.context_len <= len(request.block_ids) * BLOCK
            assert (request.lease is None) == (request.submitted.adapter is None)

    def run(self, limit: int = 10_000) -> int:
        """Step until nothing is left; the number of steps."""
        for count in range(limit):
            if not self.scheduler.has_requests:
                return count
            self.step()
        raise AssertionError("the scheduler made no progress")


def counts(batch: ScheduledBatch | None) -> dict[str, int]:
    assert batch is not None
    return {sequence.request.request_id: sequence.num_tokens for sequence in batch.sequences}


def test_a_long_prompt_is_cut_into_chunks_and_decodes_ride_along() -> None:
    bench = Bench(budget=10)
    bench.add("short", 3, max_tokens=5)
    assert counts(bench.step()) == {"short": 3}
    bench.add("long", 25)
    assert counts(bench.step()) == {"short": 1, "long": 9}
    assert counts(bench.step()) == {"short": 1, "long": 9}
    assert counts(bench.step()) == {"short": 1, "long": 7}


def test_requests_run_in_the_order_they_came() -> None:
    bench = Bench(budget=8, max_num_seqs=2)
    for name in "abc":
        bench.add(name, 4, max_tokens=2)
    assert list(counts(bench.step())) == ["a", "b"]
    assert list(counts(bench.step())) == ["a", "b"]
    assert list(counts(bench.step())) == ["c"]


def test_a_request_whose_adapter_is_missing_is_passed_by_and_served_when_it_comes() -> None:
    bench = Bench()
    adapter = AdapterKey("acme", "sha256:aa")
    bench.add("cold", 4, adapter=adapter)
    bench.add("base", 4)
    assert bench.residency.requested == [adapter]
    assert list(counts(bench.step())) == ["base"]
    assert bench.step() is None
    bench.residency.resident.add(adapter)
    assert list(counts(bench.step())) == ["cold"]
    assert bench.residency.leases == {}


def test_the_start_tells_how_long_the_adapter_took() -> None:
    bench = Bench()
    adapter = AdapterKey("acme", "sha256:aa")
    bench.add("cold", 4, adapter=adapter, tier=Tier.STORE)
    bench.now = 0.5
    bench.step()
    bench.now = 1.5
    bench.residency.resident.add(adapter)
    bench.add("warm", 4, adapter=adapter, tier=Tier.DEVICE)
    bench.now = 2.0
    cold, warm = bench.scheduler.schedule().started
    # On arrival only the fetcher knew that the block lay on the local disk.
    assert (cold.adapter_tier, cold.queue_seconds, cold.adapter_wait_seconds) == ("disk", 2.0, 1.5)
    assert (warm.adapter_tier, warm.queue_seconds, warm.adapter_wait_seconds) == ("device", 0.5, 0)


def test_a_failed_adapter_ends_its_requests_only() -> None:
    bench = Bench()
    adapter = AdapterKey("acme", "sha256:aa")
    bench.add("doomed", 4, adapter=adapter)
    bench.add("base", 4)
    bench.residency.failures[adapter] = Failure("object_not_found", "gone")
    bench.run()
    assert bench.finished == {"doomed": -1, "base": 1}


@pytest.mark.parametrize(("prompt", "max_tokens"), [(257, 1), (1, 256), (200, 57)])
def test_what_could_not_even_run_alone_is_refused_at_once(prompt: int, max_tokens: int) -> None:
    bench = Bench(num_blocks=64)
    with pytest.raises(PromptTooLong):
        bench.add("huge", prompt, max_tokens)
    assert not bench.scheduler.has_requests
    bench.add("fits", 255, 1)


def test_a_request_that_fills_the_whole_pool_runs_alone() -> None:
    bench = Bench(num_blocks=8, budget=5)
    bench.add("whole", 20, max_tokens=12)
    bench.add("other", 20, max_tokens=12)
    bench.run()
    assert bench.finished == {"whole": 12, "other": 12}


def test_when_blocks_run_out_the_last_admitted_is_preempted_and_still_finishes() -> None:
    bench = Bench(num_blocks=10)
    bench.add("old", 16, max_tokens=20)
    bench.add("new", 16, max_tokens=20)
    bench.step()
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.scheduler.num_waiting == 1
    assert bench.scheduler.num_running == 1
    bench.run()
    assert bench.finished == {"old": 20, "new": 20}
    assert bench.pool.num_free == 10


def test_a_smaller_request_does_not_take_the_blocks_an_earlier_one_waits_for() -> None:
    bench = Bench(num_blocks=8, budget=100)
    bench.add("running", 20, max_tokens=2)
    bench.step()
    bench.add("big", 20)
    bench.add("small", 4)
    assert list(counts(bench.step())) == ["running"]
    assert list(counts(bench.step())) == ["big", "small"]


def test_a_shared_beginning_is_computed_once() -> None:
    bench = Bench(prefix_caching=True)
    prompt = list(range(22))
    bench.add("first", prompt)
    bench.run()
    bench.add("second", [*prompt[:17], 99, 98])
    assert counts(bench.step()) == {"second": 19 - 16}
    bench.run()


def test_finishing_in_any_state_gives_everything_back() -> None:
    bench = Bench(budget=6)
    adapter = AdapterKey("acme", "sha256:aa")
    bench.residency.resident.add(adapter)
    prefilling = bench.add("prefilling", 20, adapter=adapter)
    bench.step()
    waiting = bench.add("waiting", 4, adapter=AdapterKey("acme", "sha256:bb"))
    bench.scheduler.finish(waiting)
    bench.scheduler.finish(prefilling)
    assert bench.pool.num_free == 64
    assert bench.residency.leases == {}
    assert not bench.scheduler.has_requests


@pytest.mark.parametrize("seed", range(30))
def test_every_request_finishes_and_nothing_leaks_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=rng.randint(6, 30),
        budget=rng.randint(3, 30),
        max_num_seqs=rng.randint(1, 8),
        prefix_caching=rng.random() < 0.7,
    )
    adapters = [AdapterKey("acme", f"sha256:{i}") for i in range(4)]
    capacity = bench.pool.num_usable * BLOCK
    live: dict[str, Request] = {}
    aborted: set[str] = set()
    expected: dict[str, int] = {}

    def maybe(probability: float) -> bool:
        return rng.random() < probability

    for step in range(300):
        for adapter in adapters:
            if maybe(0.1):
                in_use = {lease.key for lease in bench.residency.leases.values()}
                if adapter in bench.residency.resident and adapter not in in_use:
                    bench.residency.resident.discard(adapter)
                else:
                    bench.residency.resident.add(adapter)
        if maybe(0.5):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, capacity - 1))]
            max_tokens = rng.randint(1, min(12, capacity - len(prompt)))
            name = f"r{step}"
            live[name] = bench.add(name, prompt, max_tokens, rng.choice([None, *adapters]))
            expected[name] = max_tokens
        if maybe(0.1) and live:
            victim = rng.choice(list(live.values()))
            if bench.scheduler.get(victim.request_id):
                bench.scheduler.finish(victim)
                aborted.add(victim.request_id)
        bench.step()
    bench.residency.resident.update(adapters)
    bench.run()
    for name, max_tokens in expected.items():
        assert name in aborted or bench.finished[name] == max_tokens
    assert bench.pool.num_free == bench.pool.num_usable
    assert bench.residency.leases == {}


def test_a_waiting_request_never_stalls_an_idle_device() -> None:
    rng = random.Random(9)
    for _ in range(200):
        bench = Bench(num_blocks=rng.randint(4, 12), budget=rng.randint(1, 20))
        capacity = bench.pool.num_usable * BLOCK
        for index in range(rng.randint(1, 6)):
            prompt = rng.randint(1, capacity - 1)
            bench.add(f"r{index}", prompt, rng.randint(1, capacity - prompt))
        while bench.scheduler.has_requests:
            assert bench.step() is not None
