"""The report on requests, built from the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest

from ...adapters.manager import Tier
from ..messages import ListRequests, RequestList, RequestState
from ..request import Request
from ..scheduling.scheduler import Scheduler

REASONS: Mapping[str, str] = {
    "grammar": "Its grammar is being compiled or waits for compilation.",
    "adapter": "Its adapter is not on the device yet.",
    "sequences": "The maximum number of sequences is running.",
    "kv_blocks": "The KV cache does not have enough free blocks.",
    "turn": "Other tenants or earlier requests are first in the queue.",
}
"""The obstacles of a waiting request, by code."""


def list_requests(asked: ListRequests, scheduler: Scheduler, now: float) -> RequestList:
    """The answer to ListRequests; `now` by the scheduler's clock."""
    found = [
        request for request in scheduler.requests() if asked.tenant_id in (None, request.tenant_id)
    ]
    oldest = nsmallest(asked.limit, found, key=lambda request: request.arrival_time)
    states = [_state(request, scheduler, now) for request in oldest]
    return RequestList(asked.number, states, len(found))


def _state(request: Request, scheduler: Scheduler, now: float) -> RequestState:
    is_running = scheduler.is_running(request)
    is_decoding = len(request.token_ids) - request.num_computed_tokens <= 1
    return RequestState(
        request_id=request.request_id,
        tenant_id=request.tenant_id,
        adapter=request.adapter,
        state=("decoding" if is_decoding else "prefilling") if is_running else "waiting",
        waits_for=None if is_running else _obstacle(request, scheduler),
        age_seconds=now - request.arrival_time,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_generated_tokens=request.num_generated_tokens,
        num_preemptions=request.num_preemptions,
        priority=request.priority,
    )


def _obstacle(request: Request, scheduler: Scheduler) -> str:
    if request.submitted.sampling.grammar is not None and request.matcher is None:
        return "grammar"
    if scheduler.tier_of(request) not in (None, Tier.DEVICE):
        return "adapter"
    if scheduler.is_full:
        return "sequences"
    return "kv_blocks" if scheduler.is_short_of_kv else "turn"
