"""Which tokens of which requests the next step computes.

Each step has one token budget. Decoding requests come first; prompts are cut into chunks that fill
the rest, in the order of their tenants' service, least first. A request whose adapter is not
resident is skipped, not waited for. When blocks run out, the newest request of the tenant that
holds most is preempted: it is swapped in or recomputed later. So are requests of a lower priority
than one of their tenant that finds no room. Background requests run only while
there are no others: when one arrives, they are preempted.

Torch-free; takes its clock and everything it decides over as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import NamedTuple

from ...adapters.tier import Tier
from ..config import MAX_READ_ROWS
from ..errors import DeadlineExceeded, EngineError, PromptTooLong
from ..kv.blocks import KvBlocks
from ..kv.eviction import NEVER, plan_eviction
from ..kv.sequence_blocks import SequenceBlocks
from ..messages import NO_TARGETS, LatencyTargets, RequestStarted
from ..request import Request
from .adapter_leases import AdapterLeases
from .adapter_provider import AdapterProvider
from .admission_planner import AdmissionPlanner
from .background import BackgroundRequests
from .backlog import Backlog
from .batch import MAX_ROWS, BatchOrder, ScheduledBatch, ScheduledSequence, Step
from .deadlines import Deadlines
from .disk_reads import DiskReads
from .draft_policy import DraftPolicy, NoDrafts
from .fairness import VirtualTokenCounters
from .groups import Groups
from .held_requests import HeldRequests
from .preemption import Preemption
from .prefills import Prefills
from .queue_limits import QueueLimits
from .running import ROUNDING, Running
from .shares import Shares
from .step_costs import StepCosts, StepShape
from .swap_costs import SwapCosts
from .waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    max_read_rows: int = MAX_READ_ROWS
    targets: LatencyTargets = NO_TARGETS
    """Of requests without their own. Prompts and draft tokens share a step with decodes only as far
    as it is expected to stay below their ITL targets. Requests that cannot meet their TTFT target
    are refused at once, or let those pass that still can."""
    max_queued: int = 4096
    max_queued_per_tenant: int = 1024
    tenant_cap: float = 1.0
    """The part of anything that one tenant may hold while others wait."""
    max_concurrent_batches: int = 1
    """Steps that are in flight together, each with other requests: one per stage of a pipeline."""
    kv_block_bytes: tuple[int, ...] = ()
    """Per KV group, what swapping a block moves; empty: nothing is known, and swapping is free."""


class Schedule(NamedTuple):
    """The outcome of one `Scheduler.schedule`."""

    batch: ScheduledBatch | None
    """None: nothing can run now."""
    started: list[RequestStarted]
    failed: list[tuple[Request, EngineError]]
    """Requests that cannot run, or whose time is up; they have left the scheduler."""


class Scheduler:
    """Owns all requests from `add` to `finish`, and with them their blocks and leases."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        kv: KvBlocks,
        manager: AdapterProvider,
        costs: StepCosts,
        clock: Callable[[], float],
        drafts: DraftPolicy | None = None,
    ) -> None:
        """`drafts`: None for plain decoding."""
        self.limits = limits
        self.counters: VirtualTokenCounters[str] = VirtualTokenCounters()
        self._kv = kv
        self._leases = AdapterLeases(manager, clock, max_num_seqs=limits.max_num_seqs)
        self._costs = costs
        self._clock = clock
        self._drafts = drafts or NoDrafts()
        self._requests: dict[str, Request] = {}
        self._shares = Shares()
        self._running = Running(kv, self._shares, limits.max_num_seqs)
        self._waiting: WaitingQueue[Request] = WaitingQueue(self.counters, clock)
        self._groups = Groups(self._running)
        self._deadlines: Deadlines[Request] = Deadlines(attrgetter("deadline"))
        self._late_times: Deadlines[Request] = Deadlines(attrgetter("late_at"))
        self._held = HeldRequests()
        self._background = BackgroundRequests()
        self._backlog = Backlog(costs)
        self._queue_limits = QueueLimits(
            max_queued=limits.max_queued, max_queued_per_tenant=limits.max_queued_per_tenant
        )
        self._swap_costs = SwapCosts(costs, limits.kv_block_bytes)
        self._disk_reads = DiskReads(kv, self._swap_costs, clock)
        self._preemption = Preemption(
            running=self._running,
            waiting=self._waiting,
            kv=kv,
            leases=self._leases,
            costs=costs,
            swap_costs=self._swap_costs,
            tenant_cap=limits.tenant_cap,
        )
        self._order = BatchOrder()
        self._last_shape = StepShape(0, 0, 0)
        self._num_steps_launched = 0
        self._is_ahead = False
        """Whether the last step was scheduled while another was in flight."""
        self._is_held_up = False
        """Whether something of the last step must wait until all before it are read."""
        self._admission = AdmissionPlanner(
            kv=kv,
            running=self._running,
            groups=self._groups,
            preemption=self._preemption,
            swap_costs=self._swap_costs,
            chunk=limits.max_num_batched_tokens,
        )

    # --- what may be asked ----------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._held) + self._background.num_back

    @property
    def num_running(self) -> int:
        return len(self._running.requests)

    @property
    def num_preemptions(self) -> int:
        return self._preemption.num_preemptions

    @property
    def num_swaps(self) -> int:
        """Preemptions that kept what was computed."""
        return self._preemption.num_swaps

    @property
    def num_swapped(self) -> int:
        """Requests whose KV is on the host now; walks all of them."""
        return sum(request.kv.is_swapped for request in self._requests.values())

    @property
    def num_reclaims(self) -> int:
        """Preemptions for a tenant that waited for its share."""
        return self._preemption.num_reclaims

    @property
    def num_displaced(self) -> int:
        """Preemptions for a request of the same tenant with a higher priority."""
        return self._preemption.num_displaced

    @property
    def num_disk_waits_given_up(self) -> int:
        """Requests that did not wait longer for their prefix from the disk."""
        return self._disk_reads.num_given_up

    @property
    def num_tokens_from_disk(self) -> int:
        """The tokens of prefixes that were read from the disk in time."""
        return self._disk_reads.num_tokens

    @property
    def num_forks(self) -> int:
        """Requests that went on from the prompt of another in their group."""
        return self._admission.num_forks

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def can_plan_ahead(self) -> bool:
        """Whether the next step may be scheduled while one is in flight: no draft tokens are due,
        which follow known tokens, and no request needs the room of another."""
        return self._drafts.rests and not self._is_held_up

    @property
    def leased_request_ids(self) -> Iterable[str]:
        """The requests that hold a lease, and those that have left it to a step in flight."""
        leasing = (request.request_id for request in self._requests.values() if request.lease)
        return chain(leasing, self._leases.late)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def requests(self) -> Iterable[Request]:
        return tuple(self._requests.values())

    def is_running(self, request: Request) -> bool:
        """It has a place in the batch; the others wait."""
        return request in self._running

    def tier_of(self, request: Request) -> Tier | None:
        """Where the request's adapter is now; None for the base model."""
        return self._leases.tier_of(request)

    @property
    def is_full(self) -> bool:
        """As many sequences run as may."""
        return self._running.is_full

    @property
    def is_short_of_kv(self) -> bool:
        """The last step had too few KV blocks for the next request."""
        return self._admission.is_short

    # --- the life of a request ------------------------------------------------------------------

    def add(self, request: Request, *, is_held: bool = False) -> None:
        """Queue a request; one that is held counts as waiting, and runs once it is released.

        Raises PromptTooLong if it could not even run alone, DeadlineExceeded if it comes too late,
        TenantQueueFull or Overloaded if it could not run in time.
        """
        request.expect(request.submitted.targets.over(self.limits.targets))
        request.kv = self._new_kv(request)
        self._check_fits(request)
        if request.submitted.deadline_seconds == 0.0:
            raise DeadlineExceeded
        if not request.is_background:
            self._check_queue(request)
        assert request.request_id not in self._requests, "request ids are unique"
        self._requests[request.request_id] = request
        self._deadlines.add(request)
        self._late_times.add(request)
        if not request.is_background:
            self._backlog.enter(request)
        num_awaited = is_held + self._disk_reads.begin(request)
        if num_awaited:
            self._held.add(request, num_awaited)
        else:
            self._queue(request)

    def release(self, request: Request) -> None:
        """What the request was held for is there: it waits for its turn like any other, or for its
        prefix."""
        if self._held.arrive(request):
            self._queue(request)

    def finish(self, request: Request) -> None:
        """Let go of a request in whatever state it is; no later step names it.

        A step in flight may still compute it, in blocks that are free by then: what happens to
        them next happens after this step. One that has left already is left alone.
        """
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        request.has_ended = True
        self._deadlines.remove(request)
        self._late_times.remove(request)
        self._disk_reads.forget(request)
        if request in self._held:
            self._held.remove(request)
        elif not self._background.is_back(request):
            self._withdraw(request)
        if request in self._background:
            self._background.remove(request)
        if request.started:
            self._backlog.learn_output(request.num_generated_tokens)
        elif not request.is_background:
            self._backlog.leave(request)
        self._kv.release(request.kv)
        self._leases.give_back(request)
        if not self._requests:  # and perhaps no step for a long time
            self._leases.expect_none()

    def _new_kv(self, request: Request) -> SequenceBlocks:
        plan = plan_eviction(
            request.submitted.kv_policy,
            num_prompt_tokens=request.num_prompt_tokens,
            max_num_tokens=request.max_num_tokens,
            block_size=self.limits.block_size,
        )
        slides_at = self.limits.max_model_len if request.submitted.is_endless else NEVER
        return self._kv.new_sequence(plan, slides_at=slides_at)

    def _check_fits(self, request: Request) -> None:
        longest, plan = request.max_num_tokens, request.kv.eviction
        chunk = self.limits.max_num_batched_tokens
        if request.submitted.is_endless:  # what it holds does not grow with what it generates
            longest = min(longest, max(self.limits.max_model_len, request.num_prompt_tokens + 1))
        if longest > self.limits.max_model_len or not self._kv.fits_alone(longest, chunk, plan):
            capacity = min(self.limits.max_model_len, self._kv.longest(chunk))
            num_asked = request.submitted.sampling.max_tokens
            asked = f"{request.num_prompt_tokens} prompt tokens and max_tokens={num_asked}"
            if plan and longest <= capacity:  # for one step both are in the cache
                asked += f", beside the {plan.budget} tokens that kv_policy keeps,"
            raise PromptTooLong(f"{asked} exceed {capacity} tokens")

    def _check_queue(self, request: Request) -> None:
        tenant_id = request.tenant_id
        # Those that will stand back take no place in the queue.
        back = [other for other in self._background.in_front() if other not in self._running]
        num_of_tenant = self._waiting.num_of(tenant_id) + self._held.num_of(tenant_id)
        patience_seconds = self._patience_seconds(request)
        self._queue_limits.check(
            request,
            num_queued=len(self._waiting) + self._held.num_queued - len(back),
            num_of_tenant=num_of_tenant - sum(other.tenant_id == tenant_id for other in back),
            wait_seconds=self._backlog.wait_seconds(
                request, self._last_shape, num_free=self._num_free_places
            ),
            patience_seconds=patience_seconds,
        )
        if patience_seconds < math.inf:
            request.late_at = request.arrival_time + patience_seconds

    @property
    def _num_free_places(self) -> int:
        """How many requests may be admitted before a running one has to end."""
        return 0 if self._admission.is_short else self._running.num_free

    def _patience_seconds(self, request: Request) -> float:
        """How long the request may wait for its first step and still meet the TTFT target.

        Without a target forever. The whole target for a prompt that takes longer than it: nothing
        would admit such a request otherwise.
        """
        target = request.targets.ttft_seconds
        if target is None or not request.submitted.has_ttft_target:
            return math.inf
        step = self._last_shape._replace(num_prefill_tokens=request.num_prompt_tokens)
        left = target - self._costs.predict(step)
        return left if left > 0 else target

    def _queue(self, request: Request) -> None:
        """It waits for its turn; a background request until there are no others."""
        if request.is_background:
            self._background.add(request)
        else:
            self._offer(request)

    def _offer(self, request: Request) -> None:
        """From here on a step may take the request."""
        self._waiting.add(request)
        self._shares.enter(request)
        self._groups.add(request)
        self._leases.expect_last(request)

    def _withdraw(self, request: Request) -> None:
        self._groups.remove(request)
        self._shares.leave(request)
        if request in self._running:
            self._running.stop(request)
        else:
            self._waiting.remove(request)

    # --- a step ---------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Choose the next step, hand out its blocks and take its leases."""
        now, limits = self._clock(), self.limits
        self._is_ahead = self._num_steps_launched > self._leases.num_steps_read
        self._running.kv_shares.clear()
        step = Step(
            budget=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            max_read_rows=limits.max_read_rows,
            is_ahead=self._is_ahead,
            ends_at_blocks=self._kv.holds_states,
            order=self._order,
        )
        if self._kv.disk:
            for request in self._disk_reads.poll():
                self.release(request)
        if now >= self._deadlines.earliest:
            self._end_expired(step, now)
        if now >= self._late_times.earliest:
            self._defer_late(now)
        if self._background.requests:
            self._place_background(step)
        prefills = self._schedule_decodes(step)
        has_prompts = bool(prefills or self._waiting.tickets)
        self._plan_drafts(step, has_prompts=has_prompts)
        if has_prompts:
            self._bound_prefill(step)
            self._schedule_prefills(step, prefills)
        if step.num_draft_tokens:
            self._grow_drafts(step)
        if now >= self._leases.next_expect_time:
            self._leases.expect_next(self._waiting)
        self._is_held_up = step.is_held_up
        return Schedule(step.batch(self._kv.operations.take), step.started, step.failed)

    def note_launch(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Take note that a step with these sequences is in flight: the next one goes on from them.

        Its tokens are pending and its blocks unpublished until `take`.
        """
        self._num_steps_launched = number = self._num_steps_launched + 1
        for request, num_tokens, num_draft_tokens, start, samples, _ in sequences:
            request.last_step = number
            end = request.num_computed_tokens = start + num_tokens - num_draft_tokens
            # The last token is never computed.
            if samples and end + 1 < request.max_num_tokens:
                request.num_pending_tokens = end + 1 - len(request.token_ids)

    def note_read(self) -> None:
        """Take note that the output of the first step in flight was read."""
        self._leases.num_steps_read += 1
        if self._leases.late:
            self._leases.give_back_late()

    def take(self, outputs: Iterable[tuple[ScheduledSequence, list[int], int]]) -> None:
        """Take note that the step's output for these sequences is right: append what was sampled,
        charge it, and publish the blocks that the step filled.

        Each comes with its new tokens, none where nothing was sampled, and how many tokens of its
        draft are among them. The positions of the others will be written again, and their blocks
        are given back.
        """
        is_ahead, block_size = self._is_ahead, self.limits.block_size
        charged: list[Request] = []
        counts: list[int] = []
        for sequence, token_ids, num_accepted in outputs:
            request, num_tokens, num_draft_tokens, start, _, _ = sequence
            end = start + num_tokens
            if num_draft_tokens:
                end += num_accepted - num_draft_tokens
            if token_ids:
                request.token_ids += token_ids
                num_new = len(token_ids)
                charged.append(request)
                counts.append(num_new)
                if num_pending := request.num_pending_tokens:
                    left = num_pending - num_new
                    request.num_pending_tokens = left if left > 0 else 0
            kv = request.kv
            if end > kv.num_tokens_handled:
                self._kv.advance(kv, request.namespace, request.token_ids, end)
            if is_ahead:
                continue  # no draft tokens, and the blocks may be those of a later step
            request.num_computed_tokens = end
            if kv.num_writable - end > block_size:
                self._kv.shrink(kv, end + 1)
        if charged:
            self._charge_outputs(charged, counts)

    def observe(self, batch: ScheduledBatch, seconds: float, swap_seconds: float = 0.0) -> None:
        """Learn what the step cost; `swap_seconds` of it went into swapping."""
        self._last_shape = batch.shape
        self._costs.observe(batch.shape, seconds - swap_seconds)
        if batch.operations:
            self._swap_costs.observe(batch.operations, swap_seconds)

    def _charge(self, request: Request, input_tokens: int) -> None:
        """Charge the request's tenant and, while others of the tenant wait, its queue.

        A background request is free: it takes nothing that another request could have.
        """
        if request.is_background:
            return
        service = self.counters.charge(request.tenant_id, input_tokens)
        self._waiting.charge(request, service)

    def _charge_outputs(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Charge each request's tenant and queue for so many outputs, as `_charge` does."""
        if self._background.requests:
            others = [not request.is_background for request in requests]
            requests, counts = list(compress(requests, others)), list(compress(counts, others))
        self._waiting.charge_outputs(requests, counts)

    def _place_background(self, step: Step) -> None:
        """Let background requests stand back from others, or run if there are none."""
        num_background = len(self._background.requests) + self._held.num_background
        if num_background == len(self._requests):
            for request in self._background.forward():
                self._offer(request)
            return
        for request in self._background.in_front():
            if request not in self._running:
                self._stand_back(request)
            elif step.is_ahead:
                step.is_held_up = True
                step.preempted.add(request)
            else:
                self._preemption.preempt(request, step)
                self._stand_back(request)

    def _stand_back(self, request: Request) -> None:
        self._withdraw(request)
        self._background.step_back(request)

    def _end_expired(self, step: Step, now: float) -> None:
        for request_id in self._deadlines.expired(now):
            self._fail(self._requests[request_id], DeadlineExceeded(), step)

    def _defer_late(self, now: float) -> None:
        """Let those pass that can still meet their TTFT target."""
        for request_id in self._late_times.expired(now):
            request = self._requests[request_id]
            request.is_late = not request.started
            if request.is_late and request in self._waiting:
                self._waiting.defer(request)

    def _fail(self, request: Request, error: EngineError, step: Step) -> None:
        self.finish(request)
        step.failed.append((request, error))

    # --- what runs ------------------------------------------------------------------------------

    def _schedule_decodes(self, step: Step) -> list[Request]:
        """Continue every decoding request; return those that still have a prompt to compute."""
        prefills: list[Request] = []
        grow, preempted, decodes, keys = self._kv.grow, step.preempted, step.decodes, step.sort_keys
        block_size, num_context_tokens = self.limits.block_size, 0
        # Takes half as long as the class: it runs for each sequence.
        new, cls = tuple.__new__, ScheduledSequence
        budget, has_stages = self.limits.max_num_batched_tokens, False
        if self.limits.max_concurrent_batches > 1:
            budget, has_stages = self._decode_budget(), True
        requests = tuple(self._running.requests)
        is_tight = len(requests) > budget
        for request in requests:
            num_pending = request.num_pending_tokens
            if num_pending and has_stages:
                continue  # the host must know the token before the first stage begins
            num_computed = request.num_computed_tokens
            remaining = len(request.token_ids) + num_pending - num_computed
            if remaining != 1:
                if remaining:  # without any, its last token is in flight
                    prefills.append(request)
                continue
            if (preempted and request in preempted) or (is_tight and len(decodes) == budget):
                continue
            kv = request.kv
            if (
                num_computed < kv.num_writable
                or grow(kv, num_computed, 1)
                or self._preemption.make_room(request, 1, step)
            ):
                lease = request.lease if num_computed >= request.adapter_start else None
                decodes[request] = new(cls, (request, 1, 0, num_computed, True, lease))
                num_cached = num_computed - kv.num_evicted
                num_context_tokens += num_cached
                padding = (num_cached // block_size).bit_length()
                keys.append(padding * MAX_ROWS + (lease.row if lease else -1))
                if num_computed < request.num_prompt_tokens:
                    self._charge_prompt(request, 1)
        step.num_context_tokens = num_context_tokens
        return prefills

    def _decode_budget(self) -> int:
        """The most requests that may decode in a step: steps in flight together share them."""
        budget = self.limits.max_num_batched_tokens
        if not self._drafts.rests:
            return budget
        return min(budget, -(-self.num_running // self.limits.max_concurrent_batches))

    def _plan_drafts(self, step: Step, *, has_prompts: bool) -> None:
        """Let decoding requests verify draft tokens; prompts keep a block's worth of the step."""
        if self._is_ahead:
            self._drafts.pass_over()
            return
        num_free = step.budget - (self.limits.block_size if has_prompts else 0)
        if num_free <= 0 or not step.decodes:
            return
        if not (planned := self._drafts.plan(step.decodes.keys(), num_free)):
            return
        num_free = min(num_free, self._num_drafts_in_time(step))
        for request, num_wanted in planned.items():
            left = request.submitted.sampling.max_tokens - request.num_generated_tokens
            # None is in the step that compacts, as it may be wrong.
            num_uncompacted = request.kv.compacts_at - request.num_computed_tokens
            num_tokens = min(num_wanted, left - 1, num_free, num_uncompacted - 2)
            if num_tokens > 0:
                step.draft_token(request, num_tokens)
                num_free -= num_tokens

    def _num_drafts_in_time(self, step: Step) -> int:
        """How many draft tokens the decodes' targets leave room for."""
        seconds = self._costs.draft_token_seconds()
        if not seconds or not self._running.num_with_itl_target:
            return step.budget
        target = step.target_itl_seconds
        if target == math.inf:
            return step.budget
        return max(int((target - self._costs.predict(step.shape())) / seconds), 0)

    def _grow_drafts(self, step: Step) -> None:
        """Give draft tokens blocks that no other request needs, or cut them to the free ones."""
        for request, num_tokens, num_draft_tokens, *_ in step.drafting():
            kv, num_computed = request.kv, request.num_computed_tokens
            if step.is_short or not self._kv.grow(kv, num_computed, num_tokens):
                num_writable = max(kv.num_writable - num_computed - 1, 0)
                step.draft_token(request, min(num_draft_tokens, num_writable))

    def _bound_prefill(self, step: Step) -> None:
        """Leave prompts as much of the step as its decodes' targets allow, a block at least."""
        if not self._running.num_with_itl_target:
            return
        target = step.target_itl_seconds
        if target == math.inf:
            return
        shape = step.shape()
        plain = shape._replace(num_draft_tokens=0)
        drafts_seconds = self._costs.predict(shape) - self._costs.predict(plain)
        allowed = self._costs.max_prefill_tokens(
            shape.num_decodes, shape.num_context_tokens, target - drafts_seconds, step.budget
        )
        step.leave_at_most(max(allowed, self.limits.block_size))

    def _schedule_prefills(self, step: Step, prefills: list[Request]) -> None:
        """Prompts go on, and waiting ones join them, in the order of their tenants' service."""
        ordered = Prefills(prefills, self.counters)
        if self._waiting.tickets and not step.is_short:
            self._admit_waiting(step, ordered)
        for request in ordered.rest():
            self._continue_prompt(request, step)

    def _continue_prompt(self, request: Request, step: Step) -> None:
        if request in step.preempted:
            return
        num_tokens = step.room_for(request)
        if num_tokens and self._preemption.make_room(request, num_tokens, step):
            step.add(request, num_tokens)
            self._charge_prompt(request, num_tokens)

    def _charge_prompt(self, request: Request, num_tokens: int) -> None:
        """Charge the tokens of the prompt that this step is the first to compute."""
        end = min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens)
        new = end - max(request.num_charged_tokens, request.num_computed_tokens)
        if new > 0:
            request.num_charged_tokens = end
            self._charge(request, new)

    # --- what waits -----------------------------------------------------------------------------

    def _admit_waiting(self, step: Step, prefills: Prefills) -> None:
        """Admit requests that fit, least served tenant first, until the first that finds no room.

        Later ones must not take the room that it waits for.
        """
        unfinished = prefills.left()
        walk = self._waiting.candidates(self._leases.is_settled)
        for request in walk:
            for earlier in prefills.before(request):
                self._continue_prompt(earlier, step)
            if not step.budget or step.is_short:
                return
            if error := self._leases.load_error(request):
                self._fail(request, error, step)
            elif self._awaits_group(request, step) or not step.room_for(request):
                walk.skip()
            elif self._admission.exceeds(request, self._cap_on(request)):
                walk.stop_tenant()
            elif not self._admission.may_take_sequence(request):
                return self._preemption.note_blocked(request)
            elif not self._leases.take(request, self._cap_on(request)):
                walk.park_queue()
            elif self._admission.find(request, self._cap_on(request), unfinished, step):
                self._admit(request, step)
            else:
                self._leases.give_back(request)
                return self._preemption.note_blocked(request)

    def _awaits_group(self, request: Request, step: Step) -> bool:
        """Whether another of its group is computing the prompt of which it has nothing yet.

        It does not fork from one in flight: it would copy a block with values that may turn out not
        to be finite.
        """
        if request.num_computed_tokens:
            return False
        if step.is_ahead and self._groups.parent(request):
            step.is_held_up = True
            return True
        return self._groups.awaits_prompt(request)

    def _cap_on(self, request: Request) -> float:
        """The part of anything that the tenant may hold with this request.

        It is bounded while others wait; one request a tenant may run whatever it takes.
        """
        others_wait = len(self._waiting) > self._waiting.num_of(request.tenant_id)
        if others_wait and self._running.num_of(request.tenant_id) > 0:
            return self.limits.tenant_cap + ROUNDING
        return math.inf

    def _admit(self, request: Request, step: Step) -> None:
        """It has a lease and room: it runs from this step on."""
        self._waiting.admit(request)
        num_tokens = step.room_for(request)
        self._admission.take(request, num_tokens)
        step.add(request, num_tokens)
        self._charge_prompt(request, num_tokens)
        if not request.started:
            request.started = True
            request.num_cached_tokens = request.num_computed_tokens
            if not request.is_background:
                self._backlog.leave(request)
            step.started.append(self._describe_start(request))

    def _describe_start(self, request: Request) -> RequestStarted:
        return RequestStarted(
            request_id=request.request_id,
            queue_seconds=self._clock() - request.arrival_time,
            adapter_wait_seconds=request.adapter_wait_seconds,
            adapter_tier=self._leases.found_tier(request),
            num_cached_tokens=request.num_cached_tokens,
            adapter_load_ms=self._leases.load_ms(request),
            prefix_wait_seconds=request.prefix_wait_seconds,
        )
