"""Which tokens of which requests the next step computes.

Torch-free; takes its clock and everything it decides over as arguments. Each step has one token
budget: decoding requests come first, prompts are cut into chunks that fill the rest. A request
whose adapter is not resident is skipped, not waited for. When blocks run out, the request admitted
last gives its blocks back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..adapters.identity import AdapterKey
from ..adapters.residency import Residency, Tier
from .batch import ScheduledBatch, ScheduledSequence
from .block_pool import BlockPool, padding_class
from .errors import (
    AdapterDeleted,
    AdapterLoadFailed,
    AdapterTooLarge,
    EngineError,
    PromptTooLong,
)
from .messages import RequestStarted
from .prefix_cache import PrefixCache
from .request import Request


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int


class Schedule(NamedTuple):
    """The outcome of one `Scheduler.schedule`."""

    batch: ScheduledBatch | None
    """None: nothing can run now."""
    started: list[RequestStarted]
    failed: list[tuple[Request, EngineError]]
    """Requests that can never run; they have left the scheduler."""


class Scheduler:
    """Owns all requests from `add` to `finish`, and with them their blocks and leases."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
        residency: Residency[Any],
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._residency = residency
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def requests(self) -> Iterable[Request]:
        return tuple(self._requests.values())

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong if it could not even run alone."""
        longest = request.num_prompt_tokens + request.submitted.sampling.max_tokens
        capacity = min(self.limits.max_model_len, self._pool.num_usable * self.limits.block_size)
        if longest > capacity:
            raise PromptTooLong(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens="
                f"{request.submitted.sampling.max_tokens} exceed {capacity} tokens"
            )
        assert request.request_id not in self._requests, "request ids are unique"
        self._requests[request.request_id] = request
        self._waiting.append(request)
        if request.submitted.adapter:
            self._residency.request(request.submitted.adapter)

    def finish(self, request: Request) -> None:
        """Let go of a request in whatever state it is; no step may name it any more."""
        del self._requests[request.request_id]
        self._give_back(request)
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)

    def schedule(self) -> Schedule:
        """Choose the next step, hand out its blocks and take its leases."""
        step = _Step(budget=self.limits.max_num_batched_tokens)
        may_admit = self._schedule_running(step)
        if may_admit:
            self._admit_waiting(step)
        return Schedule(step.batch(), step.started, step.failed)

    def advance(self, sequence: ScheduledSequence) -> None:
        """Take note that a step has computed this sequence; publish the blocks it filled."""
        request = sequence.request
        request.num_computed_tokens += sequence.num_tokens
        if self._prefix_cache is None:
            return
        size = self.limits.block_size
        for index in range(request.num_published_blocks, request.num_computed_tokens // size):
            request.last_block_key = self._prefix_cache.publish(
                request.namespace,
                request.last_block_key,
                request.token_ids[index * size : (index + 1) * size],
                request.block_ids[index],
            )
            request.num_published_blocks = index + 1

    def _schedule_running(self, step: _Step) -> bool:
        """Continue what runs, decodes first; False if that took preemptions."""
        preempted: set[Request] = set()
        for request in sorted(self._running, key=lambda request: request.num_remaining_tokens > 1):
            num_tokens = min(request.num_remaining_tokens, step.budget)
            while num_tokens and request not in preempted:
                blocks = self._grow(request, num_tokens)
                if blocks is not None:
                    step.add(request, num_tokens, blocks)
                    break
                victim = self._running[-1]
                self._preempt(victim)
                preempted.add(victim)
                step.cancel(victim)
        return not preempted

    def _admit_waiting(self, step: _Step) -> None:
        absent: set[AdapterKey | None] = set()
        for request in tuple(self._waiting):
            if not step.budget or len(self._running) == self.limits.max_num_seqs:
                return
            adapter = request.submitted.adapter
            if adapter not in absent and self._fails(request, step):
                continue
            if adapter in absent or not self._lease(request):
                absent.add(adapter)
                if request.adapter_missing_since is None:
                    request.adapter_missing_since = self._clock()
                continue
            if not self._admit(request, step):
                # Smaller requests behind it must not take the blocks it waits for.
                return

    def _fails(self, request: Request, step: _Step) -> bool:
        adapter = request.submitted.adapter
        failure = self._residency.failure(adapter) if adapter else None
        if failure is None:
            return False
        self.finish(request)
        error = _LOAD_ERRORS.get(failure.code, AdapterLoadFailed)
        step.failed.append((request, error(f"{error.__doc__} {failure.message}")))
        return True

    def _lease(self, request: Request) -> bool:
        adapter = request.submitted.adapter
        if adapter is None:
            return True
        request.lease = self._residency.acquire(adapter, request.request_id)
        if request.lease is None:
            return False
        if request.adapter_missing_since is not None:
            request.adapter_wait_seconds += self._clock() - request.adapter_missing_since
            request.adapter_missing_since = None
        return True

    def _admit(self, request: Request, step: _Step) -> bool:
        self._reuse_prefix(request)
        # Blocks come chunk by chunk, but who could not finish its prompt would only be preempted.
        if self._num_missing_blocks(request, request.num_remaining_tokens) > self._pool.num_free:
            self._give_back(request)
            return False
        num_tokens = min(request.num_remaining_tokens, step.budget)
        blocks = self._grow(request, num_tokens)
        assert blocks is not None
        self._waiting.remove(request)
        self._running.append(request)
        if not request.started:
            request.started = True
            request.num_cached_tokens = request.num_computed_tokens
            step.started.append(self._describe_start(request))
        step.add(request, num_tokens, blocks)
        return True

    def _reuse_prefix(self, request: Request) -> None:
        if self._prefix_cache is None:
            return
        block_ids, key = self._prefix_cache.match(request.namespace, request.token_ids)
        request.block_ids = block_ids
        request.last_block_key = key
        request.num_published_blocks = len(block_ids)
        request.num_computed_tokens = len(block_ids) * self.limits.block_size

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Give the request the blocks that `num_tokens` more tokens need.

        None if there are too few.
        """
        blocks = self._pool.allocate(self._num_missing_blocks(request, num_tokens))
        if blocks is not None:
            request.block_ids.extend(blocks)
        return blocks

    def _num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        length = request.num_computed_tokens + num_tokens
        return max(-(-length // self.limits.block_size) - len(request.block_ids), 0)

    def _preempt(self, victim: Request) -> None:
        self.num_preemptions += 1
        self._running.remove(victim)
        self._waiting.appendleft(victim)
        self._give_back(victim)

    def _give_back(self, request: Request) -> None:
        self._pool.free(request.block_ids)
        self._residency.release(request.request_id)
        request.forget_progress()

    def _describe_start(self, request: Request) -> RequestStarted:
        return RequestStarted(
            request_id=request.request_id,
            queue_seconds=self._clock() - request.arrival_time,
            adapter_wait_seconds=request.adapter_wait_seconds,
            adapter_tier=self._found_tier(request),
            num_cached_tokens=request.num_cached_tokens,
        )

    def _found_tier(self, request: Request) -> Tier | None:
        """Where the adapter was when the request came; what lay on disk only the fetcher knew."""
        adapter = request.submitted.adapter
        if adapter is None or request.adapter_tier is not Tier.STORE:
            return request.adapter_tier
        return self._residency.loaded_from(adapter) or Tier.STORE


_LOAD_ERRORS: dict[str, type[EngineError]] = {
    error.code: error for error in (AdapterDeleted, AdapterTooLarge)
}
"""What a caller can act on; every other failure of a load is one for the operator's log."""


class _Step:
    """A step in the making."""

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.started: list[RequestStarted] = []
        self.failed: list[tuple[Request, EngineError]] = []
        self._sequences: dict[Request, ScheduledSequence] = {}
        self._new_block_ids: list[int] = []

    def add(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        self._sequences[request] = ScheduledSequence(request, num_tokens)
        self._new_block_ids += new_block_ids
        self.budget -= num_tokens

    def cancel(self, request: Request) -> None:
        sequence = self._sequences.pop(request, None)
        if sequence:
            self.budget += sequence.num_tokens

    def batch(self) -> ScheduledBatch | None:
        if not self._sequences:
            return None
        ordered = sorted(self._sequences.values(), key=_batch_order)
        return ScheduledBatch(tuple(ordered), tuple(self._new_block_ids))


def _batch_order(sequence: ScheduledSequence) -> tuple[bool, int]:
    lease = sequence.request.lease
    if sequence.is_decode:
        return False, padding_class(len(sequence.request.block_ids))
    return True, lease.row if lease else -1
