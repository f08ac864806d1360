"""The leases of requests, without a scheduler."""

from __future__ import annotations

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.adapter_leases import MAX_EXPECTED, AdapterLeases
from loraplex.engine.scheduling.fairness import VirtualTokenCounters
from loraplex.engine.scheduling.waiting import WaitingQueue
from support.scheduling import FakeAdapterManager

A = AdapterKey("acme", "sha256:aa")


class Bench:
    def __init__(self, max_num_seqs: int = 4) -> None:
        self.now = 0.0
        self.manager = FakeAdapterManager()
        self.leases = AdapterLeases(self.manager, lambda: self.now, max_num_seqs=max_num_seqs)


def make_request(
    adapter: AdapterKey | None = A, *, tier: Tier | None = None, name: str = "r"
) -> Request:
    submitted = GenerationRequest(name, "acme", [1], SamplingParams(max_tokens=1), adapter)
    return Request(submitted, CacheNamespace("acme", "runtime", adapter), 0, 0.0, tier)


def test_all_the_time_that_a_request_lacked_its_adapter_is_added_up() -> None:
    bench, request = Bench(), make_request()
    for missed, came in ((1.0, 3.0), (10.0, 14.0)):
        bench.manager.resident.clear()
        for bench.now in (missed, missed + 1.0):
            assert not bench.leases.is_settled(request)
            assert not bench.leases.take(request, 1.0)
            assert request.lease is None
        bench.manager.resident.add(A)
        bench.now = came
        assert bench.leases.is_settled(request)
        assert bench.leases.take(request, 1.0)
        assert request.lease is not None
        bench.now = came + 5.0
        bench.leases.give_back(request)
        assert request.lease is None
    assert request.adapter_wait_seconds == (3.0 - 1.0) + (14.0 - 10.0)


def test_a_request_whose_adapter_went_before_it_was_taken_waits_from_then_on() -> None:
    bench, request = Bench(), make_request()
    bench.now = 2.0
    assert not bench.leases.take(request, 1.0)
    bench.now = 5.0
    bench.manager.resident.add(A)
    assert bench.leases.take(request, 1.0)
    assert request.adapter_wait_seconds == 3.0


@pytest.mark.parametrize(
    ("adapter", "tier", "waited", "load_ms"),
    [
        (None, None, 0.0, None),
        (A, Tier.DEVICE, 0.0, 0.0),
        (A, Tier.DEVICE, 1.0, 250.0),
        (A, Tier.STORE, 0.0, 250.0),
        (A, Tier.STORE, 1.0, 250.0),
    ],
)
def test_the_load_is_told_of_an_adapter_that_was_not_there(
    adapter: AdapterKey | None, tier: Tier | None, waited: float, load_ms: float | None
) -> None:
    bench, request = Bench(), make_request(adapter, tier=tier)
    request.adapter_wait_seconds = waited
    assert bench.leases.load_ms(request) == load_ms


def test_the_base_model_needs_no_adapter_and_is_in_no_tier() -> None:
    bench, request = Bench(), make_request(None)
    assert bench.leases.is_settled(request)
    assert bench.leases.load_error(request) is None
    assert bench.leases.take(request, 0.0)
    assert bench.leases.tier_of(request) is None
    assert bench.leases.tier_of(make_request()) is Tier.STORE
    bench.manager.resident.add(A)
    assert bench.leases.tier_of(make_request()) is Tier.DEVICE


@pytest.mark.parametrize("max_num_seqs", [MAX_EXPECTED // 2 - 1, MAX_EXPECTED])
def test_the_adapters_of_two_batches_are_expected_at_least(max_num_seqs: int) -> None:
    bench = Bench(max_num_seqs)
    queue: WaitingQueue[Request] = WaitingQueue(VirtualTokenCounters(), lambda: 0.0)
    for index in range(2 * MAX_EXPECTED + 9):
        adapter = AdapterKey("acme", f"sha256:{index}")
        queue.add(make_request(adapter, name=f"r{index}"))
    bench.leases.expect_next(queue)
    assert len(bench.manager.expected) == max(MAX_EXPECTED, 2 * max_num_seqs)
