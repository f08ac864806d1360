"""The order of running prompts, and the limits of those that wait."""

from __future__ import annotations

import math

import pytest

from loraplex.engine.errors import Overloaded, TenantQueueFull
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.fairness import VirtualTokenCounters
from loraplex.engine.scheduling.held_requests import HeldRequests
from loraplex.engine.scheduling.prefills import Prefills
from loraplex.engine.scheduling.queue_limits import MIN_RETRY_SECONDS, QueueLimits


def make_request(tenant: str, deadline: float | None = None) -> Request:
    sampling = SamplingParams(max_tokens=1)
    submitted = GenerationRequest("r", tenant, [1], sampling, deadline_seconds=deadline)
    return Request(submitted, CacheNamespace(tenant, "runtime", None), 0, 0.0, None)


def test_prompts_go_on_in_the_order_of_their_tenants_service_before_who_was_served_more() -> None:
    counters: VirtualTokenCounters[str] = VirtualTokenCounters()
    for tenant, served in (("most", 30), ("some", 20), ("equal", 20), ("least", 10)):
        counters.charge(tenant, input_tokens=served)
    most, some, equal, least, more = (
        make_request(tenant) for tenant in ("most", "some", "equal", "least", "some")
    )
    prefills = Prefills([most, some, equal, least, more], counters)
    assert prefills.left() == (least, some, equal, more, most)
    assert list(prefills.before(make_request("least"))) == [least]
    assert list(prefills.before(make_request("new"))) == []
    assert list(prefills.before(make_request("some"))) == [some]
    counters.charge("some", input_tokens=5)
    assert list(prefills.before(make_request("some"))) == [equal, more]
    assert prefills.left() == (most,)
    assert list(prefills.rest()) == [most]
    assert prefills.left() == ()


def test_held_requests_are_counted_by_tenant() -> None:
    held = HeldRequests()
    first, second, other = make_request("a"), make_request("a"), make_request("b")
    for request in (first, second, other):
        held.add(request)
    assert (len(held), held.num_of("a"), held.num_of("b"), held.num_of("c")) == (3, 2, 1, 0)
    held.remove(first)
    assert (len(held), held.num_of("a"), first in held, second in held) == (2, 1, False, True)
    held.remove(second)
    assert (len(held), held.num_of("a"), held.num_of("b")) == (1, 0, 1)


@pytest.mark.parametrize(
    ("num_queued", "num_of_tenant", "wait", "refusal"),
    [
        (4, 2, 9.0, None),
        (5, 2, 0.0, Overloaded),
        (4, 3, 0.0, TenantQueueFull),
        (5, 3, 0.0, TenantQueueFull),
        (0, 0, 9.1, Overloaded),
    ],
)
def test_a_request_is_refused_where_a_queue_is_full_or_it_waits_beyond_its_deadline(
    num_queued: int, num_of_tenant: int, wait: float, refusal: type[Overloaded] | None
) -> None:
    limits = QueueLimits(max_queued=5, max_queued_per_tenant=3)

    def check(deadline: float | None) -> None:
        limits.check(
            make_request("a", deadline),
            num_queued=num_queued,
            num_of_tenant=num_of_tenant,
            wait_seconds=wait,
            patience_seconds=math.inf,
        )

    if refusal is None:
        check(9.0)
        return
    with pytest.raises(refusal) as refused:
        check(9.0)
    assert refused.value.retry_after_seconds == max(wait, MIN_RETRY_SECONDS)
