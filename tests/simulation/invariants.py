"""The invariants before, in and after every step; full audits run every few steps.

The cheap checks use the simulation's own records. The audits also call the components' own checks
and compare caches with the device's contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.engine.errors import AdapterDeleted, EngineError, NotNow, PromptTooLong
from loraplex.engine.kv.disk_tier import Place
from loraplex.engine.kv.group_blocks import GroupBlocks
from loraplex.engine.kv.host_slots import HostSlots
from loraplex.engine.kv.layout import KvOperation, SwapIn, SwapOut
from loraplex.engine.kv.prefix_cache import CacheNamespace, Prefix
from loraplex.engine.messages import GenerationRequest, LatencyTargets
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from loraplex.engine.scheduling.step_costs import StepShape
from support.block_tables import blocks_of, tables_of

from .border import BLOCK_BYTES
from .contents import STOP_TOKEN, Contents, End, next_token, values_of_block
from .costs import CostChecks
from .device import moved
from .disk import is_of
from .evictions import EvictionChecks
from .ledger import Order
from .service import ServiceChecks
from .violation import Invariant, Violation, require

if TYPE_CHECKING:
    from .world import World

AUDIT_INTERVAL = 8
"""Steps between two full audits: they cost about as much as the steps."""


class Queues(NamedTuple):
    """How full the queues were before a request came, without background requests."""

    num_waiting: int
    num_of_tenant: int
    wait_seconds: float
    """How long the request is expected to wait behind those that are due no later."""
    patience_seconds: float
    """How long it may wait for its TTFT target."""

    @property
    def is_hopeless(self) -> bool:
        return self.wait_seconds > self.patience_seconds


class Checks:
    """The invariants over one life of an engine."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engine = world.engine
        self._kv = world.engine.kv
        self._scheduler = world.engine.scheduler
        self._limits = world.scenario.limits
        self._num_groups = len(world.scenario.groups)
        self.costs = CostChecks(world.engine)
        self.service = ServiceChecks(world.engine.scheduler)
        smallest = min(group.num_usable for group in world.scenario.groups)
        self._slack = world.scenario.limits.max_num_seqs / smallest
        """Every running sequence may take a block of the smallest group in a step."""
        for group in self._kv.groups:
            host = group.host
            host.store = self._watched(host, host.store)  # type: ignore[assignment, method-assign]
            host.reserve = self._watched(host, host.reserve)  # type: ignore[assignment, method-assign]
        for slots in self._kv.disk.slots if self._kv.disk else ():
            slots.reserve = self._watched(slots, slots.reserve)  # type: ignore[assignment, method-assign]
        self._num_idle_steps = 0
        self._named: dict[bytes, tuple[CacheNamespace, bytes, tuple[int, ...]]] = {}
        """What each key of the prefix cache was seen to stand for."""
        self._ends: dict[bytes, End] = {}
        self._ran: set[Request] = set()
        """Who ran when the last step ended."""
        self._late: set[Request] = set()
        """Who had not begun when it would have had to for its TTFT target."""
        self._num_given_way = 0
        self._num_displaced = 0
        self._num_preemptions: dict[Request, int] = {}
        """Of those that lived when the last step ended."""
        self._has_its_adapter = world.engine.forward.has_its_adapter
        self._num_left: dict[str, int] = {}
        self.evictions = EvictionChecks(world.engine.manager, lambda: world.now)
        self.num_window_frees = 0

    # --- admission ------------------------------------------------------------------------------

    def before_add(self, submitted: GenerationRequest) -> Queues:
        waiting = [
            order.submitted.tenant_id
            for order in self._world.ledger.live.values()
            if not order.submitted.is_background and order.request not in self._scheduler._running
        ]
        return Queues(
            len(waiting),
            waiting.count(submitted.tenant_id),
            self._wait_seconds(submitted),
            self._patience_seconds(submitted),
        )

    def _wait_seconds(self, submitted: GenerationRequest) -> float:
        """The prompts ahead, and as many ends as it takes and a deviation more."""
        scheduler, due = self._scheduler, self._due_time(submitted, self._world.now)
        unbegun = [
            order
            for order in self._world.ledger.live.values()
            if not (order.submitted.is_background or order.request.started)
        ]
        weights = {order.submitted.tenant_id: order.submitted.tenant_weight for order in unbegun}
        ahead = [
            order
            for order in unbegun
            if order.submitted.tenant_id == submitted.tenant_id
            and self._due_time(order.submitted, order.request.arrival_time) <= due
        ]
        if not ahead:
            return 0.0
        stretch = sum(weights.values()) / submitted.tenant_weight
        num_tokens, num_of_tenant = (
            sum(len(order.submitted.prompt_token_ids) for order in orders)
            for orders in (unbegun, ahead)
        )
        is_short, num_running = scheduler.is_short_of_kv, len(scheduler._running.requests)
        num_free = 0 if is_short else max(self._limits.max_num_seqs - num_running, 0)
        num_ends = max(min(len(ahead) * stretch, len(unbegun)) + 1 - num_free, 0)
        return self._engine.costs.wait_seconds(
            int(min(num_of_tenant * stretch, num_tokens)),
            int((num_ends + num_ends**0.5) * (scheduler._backlog._output_tokens or 0)),
            scheduler._last_shape,
        )

    def _targets(self, submitted: GenerationRequest) -> LatencyTargets:
        own, default = submitted.targets, self._limits.targets
        return LatencyTargets(
            own.ttft_seconds or default.ttft_seconds, own.itl_seconds or default.itl_seconds
        )

    def _due_time(self, submitted: GenerationRequest, arrival_time: float) -> float:
        """Nobody is due later than half a minute after it came."""
        target = self._targets(submitted).ttft_seconds
        return arrival_time + (30.0 if target is None else min(target, 30.0))

    def _patience_seconds(self, submitted: GenerationRequest) -> float:
        """The target less the step that computes the prompt, unless that is longer."""
        target = self._targets(submitted).ttft_seconds
        is_exempt = submitted.is_background or submitted.is_further
        if target is None or is_exempt or not submitted.sampling.max_tokens:
            return math.inf
        num_tokens = len(submitted.prompt_token_ids)
        shape = self._scheduler._last_shape._replace(num_prefill_tokens=num_tokens)
        seconds = self._engine.costs.predict(shape)
        return target - seconds if seconds < target else target

    def after_add(self, submitted: GenerationRequest, before: Queues) -> None:
        limits = self._limits
        require(
            _length(submitted) <= limits.max_model_len,
            Invariant.CAPS,
            f"{submitted.request_id} may grow to {_length(submitted)} tokens",
        )
        require(
            submitted.adapter not in self._world.deleting,
            Invariant.DRAINS,
            f"{submitted.request_id} begins though {submitted.adapter} is being deleted",
        )
        require(
            submitted.is_background
            or (
                before.num_waiting < limits.max_queued
                and before.num_of_tenant < limits.max_queued_per_tenant
            ),
            Invariant.CAPS,
            f"{submitted.request_id} was queued behind {before}",
        )
        require(
            not before.is_hopeless,
            Invariant.CAPS,
            f"{submitted.request_id} was queued though it cannot begin in time: {before}",
        )
        request = self._scheduler.get(submitted.request_id)
        late_at = self._world.now + before.patience_seconds
        require(
            request is not None
            and (math.inf if request.late_at is None else request.late_at) == late_at,
            Invariant.PRIORITY,
            f"{submitted.request_id} is not late at {late_at}",
        )

    def after_refusal(
        self, submitted: GenerationRequest, refusal: EngineError, before: Queues
    ) -> None:
        """Nobody is refused without a reason."""
        limits = self._limits
        if isinstance(refusal, AdapterDeleted):
            is_right = submitted.adapter in self._world.deleting
        elif isinstance(refusal, PromptTooLong):
            num_blocks = -(-_length(submitted) // limits.block_size)
            if submitted.kv_policy:  # for one step it also holds what it compacts to
                num_blocks += -(-submitted.kv_policy.budget // limits.block_size)
            is_right = _length(submitted) > limits.max_model_len or any(
                num_blocks > self._kv.groups[group].num_lasting for group in range(self._num_groups)
            )
        else:
            is_full = (
                before.num_waiting >= limits.max_queued
                or before.num_of_tenant >= limits.max_queued_per_tenant
            )
            # Nobody is refused for the queue of another tenant.
            is_hopeless = before.is_hopeless and before.num_of_tenant > 0
            self._world.coverage["refused_hopeless"] += is_hopeless
            is_late = submitted.deadline_seconds is not None or is_hopeless
            is_right = (is_full or is_late) and not submitted.is_background
            assert isinstance(refusal, NotNow)
            require(refusal.retry_after_seconds or 0 > 0, Invariant.PROGRESS, "retry never")
        require(is_right, Invariant.PROGRESS, f"{submitted.request_id} refused: {refusal}")

    # --- a step ---------------------------------------------------------------------------------

    def before_run(self, batch: ScheduledBatch) -> None:
        """What a batch may contain, before anything of it is executed."""
        limits, sequences = self._limits, batch.sequences
        num_tokens = sum(sequence.num_tokens for sequence in sequences)
        requests = {sequence.request.request_id for sequence in sequences}
        require(len(requests) == len(sequences), Invariant.ONE_WRITER, "a request runs twice")
        require(len(sequences) <= limits.max_num_seqs, Invariant.CAPS, f"{len(sequences)} run")
        require(num_tokens <= limits.max_num_batched_tokens, Invariant.CAPS, f"{num_tokens} tokens")
        num_read = sum(len(entry.read) for entry in sequences if entry.request.reads_logits)
        require(num_read <= limits.max_read_rows, Invariant.CAPS, f"{num_read} rows are read")
        for sequence in sequences:
            request = sequence.request
            name = request.request_id
            require(name in self._world.ledger.live, Invariant.ONE_END, f"{name} runs, dead")
            require(
                0 < sequence.num_known_tokens <= request.num_remaining_tokens,
                Invariant.OWN_CONTENT,
                f"{name} computes {sequence.num_known_tokens} of {request.num_remaining_tokens}",
            )
            self._check_drafts(sequence)
            is_right = self._engine.forward.is_current(sequence)
            require(is_right, Invariant.LEASE_IS_ROW, f"{sequence.lease}")
            require(
                request.deadline is None or request.deadline > self._world.now,
                Invariant.PROGRESS,
                f"{name} runs on behind its deadline",
            )
        self._check_background(batch)
        self._check_caps()
        self._check_target(batch)
        self._check_shortage(batch)
        self._check_displaced()
        self._check_order()
        if self._world.num_steps % AUDIT_INTERVAL == 0:
            self._audit_cache(batch.operations)

    def _contenders(self) -> list[Order]:
        """Those that the next step may take: background requests only if there are no others, and
        none that waits for its prefix from the disk."""
        live = list(self._world.ledger.live.values())
        others = [order for order in live if not order.submitted.is_background]
        reads = self._scheduler._disk_reads
        return [order for order in others or live if order.request not in reads]

    def _check_background(self, batch: ScheduledBatch) -> None:
        contenders = {order.request for order in self._contenders()}
        for sequence in batch.sequences:
            is_right = sequence.request in contenders
            require(is_right, Invariant.BACKGROUND, f"{sequence.request.request_id} runs")
            self._world.coverage["background"] += sequence.request.is_background

    def _num_stood_back(self) -> int:
        """How many background requests ran in the last step, and wait for others now."""
        return sum(
            request.is_background
            and request.request_id in self._world.ledger.live
            and request not in self._scheduler._running
            for request in self._ran
        )

    def _check_drafts(self, sequence: ScheduledSequence) -> None:
        """Only who decodes draft tokens, and not beyond what may be generated."""
        request, num_draft_tokens = sequence.request, sequence.num_draft_tokens
        if len(request.draft):
            raise Violation(Invariant.AS_PLAIN, f"{request.draft} before the step")
        if not num_draft_tokens:
            return
        most = request.submitted.sampling.max_tokens - request.num_generated_tokens - 1
        may_draft = sequence.num_known_tokens == request.num_remaining_tokens == 1
        require(
            num_draft_tokens <= (most if may_draft else 0),
            Invariant.CAPS,
            f"{request.request_id} drafts {num_draft_tokens} tokens of {most}",
        )

    def _check_shortage(self, batch: ScheduledBatch) -> None:
        """Where running requests had to give way for want of blocks, none went to draft tokens."""
        scheduler = self._scheduler
        given_way = scheduler.num_preemptions - scheduler.num_reclaims - scheduler.num_displaced
        num_stood_back = self._num_stood_back()
        self._world.coverage["background_preempted"] += num_stood_back
        is_short = given_way > self._num_given_way + num_stood_back
        self._num_given_way = given_way
        self._count_given_way()
        for sequence in batch.sequences if is_short else ():
            require(
                not sequence.num_draft_tokens or self._num_spare(sequence.request) == 0,
                Invariant.CAPS,
                f"others gave way for drafts of {sequence.request.request_id}",
            )

    def _check_displaced(self) -> None:
        """As many as were displaced have given way to one that may displace them."""
        num_displaced = self._scheduler.num_displaced - self._num_displaced
        self._num_displaced += num_displaced
        if not num_displaced:
            return
        live = {order.request for order in self._contenders()}
        known = self._num_preemptions
        gone = [request for request in live if request.num_preemptions > known.get(request, 0)]
        num_right = sum(
            any(
                other.tenant_id == request.tenant_id
                and other.priority < request.priority
                and self._rank(other) < self._rank(request)
                for other in live - self._ran
            )
            for request in gone
        )
        require(
            num_right >= num_displaced,
            Invariant.PRIORITY,
            f"{num_displaced} displaced, {num_right} of {len(gone)} by one that may",
        )

    def _rank(self, request: Request) -> float:
        """When it is due. A level of priority is worth half a minute, and so is having waited too
        long to begin."""
        level = request.priority + (request in self._late)
        return self._due_time(request.submitted, request.arrival_time) + 30.0 * level

    def _check_order(self) -> None:
        """Nobody begins before another of its queue with a lesser rank.

        But for those that a step may skip: of groups, and those whose prompt is read.
        """
        now, orders = self._world.now, self._world.ledger.live
        began = {event.request_id for event in self._engine.schedule.started}
        self._late = {request for request in self._late if request.request_id in orders}
        for name, order in orders.items():
            late_at, has_begun = order.request.late_at, order.request.started and name not in began
            if late_at is not None and late_at <= now and not has_begun:
                self._world.coverage["late"] += order.request not in self._late
                self._late.add(order.request)
        waiting = [
            order.request
            for order in self._contenders()
            if not (order.request.started or order.submitted.group_id or order.request.reads_logits)
        ]
        for name in began & orders.keys():
            first = orders[name].request
            passed = [
                other
                for other in waiting
                if (other.tenant_id, other.adapter) == (first.tenant_id, first.adapter)
                and self._rank(other) < self._rank(first)
            ]
            require(not passed, Invariant.PRIORITY, f"{name} begins before {passed[:1]}")

    def _count_given_way(self) -> None:
        """Who gave way though it was to propose in this step, or had drafted before."""
        for request in self._ran:
            has_drafts = request in self._engine.draft_tokens.wanted or request.num_draft_tokens
            is_live = request.request_id in self._world.ledger.live
            if has_drafts and is_live and request not in self._scheduler._running:
                self._world.coverage["drafts_preempted"] += 1
                self._world.coverage["drafts_swapped"] += request.kv.is_swapped

    def _num_spare(self, request: Request) -> int:
        """Blocks that the known tokens do not need."""
        num_tokens = len(request.token_ids) + request.num_pending_tokens - request.kv.num_evicted
        needed = -(-num_tokens // self._limits.block_size)
        return max(len(tables_of(request.kv)[0]) - needed, 0)

    def _check_target(self, batch: ScheduledBatch) -> None:
        """Beside decodes, prompts and drafts are cut to what the strictest target leaves, but
        prompts to no less than a block."""
        decodes = [
            request
            for request, *_ in batch.sequences
            if request in self._ran and request.num_remaining_tokens == 1
        ]
        targets = [self._targets(request.submitted).itl_seconds for request in decodes]
        target = min((each for each in targets if each is not None), default=None)
        if target is None:
            return
        num_context = sum(
            request.num_computed_tokens - request.kv.num_evicted for request in decodes
        )
        self._check_drafts_in_time(batch, StepShape(0, len(decodes), num_context), target)
        allowed = self._engine.costs.max_prefill_tokens(
            len(decodes),
            num_context,
            target - self._seconds_of_drafts(batch),
            self._limits.max_num_batched_tokens,
        )
        num_tokens = sum(count for request, count, *_ in batch.sequences if request not in decodes)
        num_preempted = sum(request not in self._scheduler._running for request in self._ran)
        require(  # the token of a decode that gave way may go to a prompt
            num_tokens <= max(allowed, self._limits.block_size) + num_preempted,
            Invariant.CAPS,
            f"{num_tokens} tokens of prompts where {allowed} are allowed",
        )

    def _check_drafts_in_time(
        self, batch: ScheduledBatch, decodes: StepShape, target: float
    ) -> None:
        """Draft tokens take no more than what the decodes alone leave of the target."""
        costs, num_draft_tokens = self._engine.costs, batch.shape.num_draft_tokens
        seconds = num_draft_tokens * costs.draft_token_seconds()
        self._world.coverage["drafts_in_time"] += seconds > 0
        require(
            not seconds or seconds <= target - costs.predict(decodes) + 1e-9,
            Invariant.CAPS,
            f"{num_draft_tokens} draft tokens where {target} s are allowed",
        )

    def _seconds_of_drafts(self, batch: ScheduledBatch) -> float:
        costs, plain = self._engine.costs, batch.shape._replace(num_draft_tokens=0)
        return costs.predict(batch.shape) - costs.predict(plain)

    def _check_caps(self) -> None:
        """Who was admitted although others wait, and went on waiting, is within the caps."""
        running = set(self._scheduler._running.requests)
        admitted = running - self._ran
        if not admitted:
            return
        waiting = {
            order.submitted.tenant_id
            for order in self._contenders()
            if order.request not in running and order.request not in self._ran
        }
        for tenant_id in {request.tenant_id for request in admitted}:
            mine = [request for request in running if request.tenant_id == tenant_id]
            if len(mine) == 1 or not waiting - {tenant_id}:
                continue
            most = self._limits.tenant_cap * self._limits.max_num_seqs + 1e-9
            require(len(mine) <= most, Invariant.CAPS, f"{len(mine)} of {tenant_id} run")
            held = max(self._held_share(mine, group) for group in range(self._num_groups))
            require(
                held <= self._limits.tenant_cap + self._slack,
                Invariant.CAPS,
                f"{tenant_id} holds {held} of the blocks",
            )

    def _held_share(self, requests: list[Request], group: int) -> float:
        """The part of a group's blocks that these requests hold, each block counted once."""
        blocks = set(chain.from_iterable(blocks_of(request.kv)[group] for request in requests))
        return len(blocks - {0}) / self._kv.num_usable(group)

    def after_step(self, batch: ScheduledBatch | None) -> None:
        if batch is None:
            self._check_displaced()  # they gave way, and another step is to make the rest of room
        live = [order.request for order in self._world.ledger.live.values()]
        known = self._scheduler.requests()
        require(
            {request.request_id for request in known} == self._world.ledger.live.keys(),
            Invariant.ONE_END,
            "the scheduler knows other requests than its callers",
        )
        self._check_blocks(live)
        self._check_leases(live)
        self._check_memory()
        self._check_host_memory()
        self._check_delivery(live)
        self._check_drains()
        self._check_progress(batch)
        self.service.check()
        self._count_window_frees(live)
        self._ran = set(self._scheduler._running.requests)
        self._num_preemptions = {request: request.num_preemptions for request in live}
        if self._world.num_steps % AUDIT_INTERVAL == 0:
            self.audit()

    def after_end(self, order: Order, reason: str) -> None:
        """Whoever has ended holds nothing from this moment on."""
        request = order.request
        self.service.settle(request, reason)
        self._check_output(request)
        self._num_left.pop(request.request_id, None)
        require(
            not any(chain.from_iterable(blocks_of(request.kv))) and not request.kv.is_swapped,
            Invariant.QUIESCENT,
            f"{request.request_id} ended with {reason} and holds {tables_of(request.kv)}",
        )
        if reason == "deadline_exceeded":
            assert request.deadline is not None
            require(request.deadline <= self._world.now, Invariant.PROGRESS, "ended too early")

    def _check_output(self, request: Request) -> None:
        """Each token follows from those before it, and from nothing that was drafted."""
        tokens, start = request.token_ids, request.num_prompt_tokens
        if len(tokens) == start:
            return
        values = Contents(request.namespace).up_to(tokens, len(tokens))
        plain = [next_token(value, request.seed) for value in values[start - 1 : -1]]
        if tokens[start:] != plain:
            raise Violation(Invariant.AS_PLAIN, f"{tokens[start:]} generated, not {plain}")
        if STOP_TOKEN in plain[:-1] and not request.submitted.sampling.ignore_eos:
            raise Violation(Invariant.AS_PLAIN, f"{plain} go on behind the end")

    def after_eviction(self, key: AdapterKey) -> None:
        """The engine says that an adapter is gone: no tier has it, nor anything computed by it."""
        require(key not in self._engine.arena.cells, Invariant.QUIESCENT, f"{key} on the device")
        require(not self._engine.host.holds(key), Invariant.QUIESCENT, f"{key} in host memory")
        left = [o for o in self._world.ledger.live.values() if o.submitted.adapter == key]
        require(not left, Invariant.DRAINS, f"{key} is gone and {len(left)} requests are not")
        require(not self._engine.outputs.of(key), Invariant.QUIESCENT, f"outputs of {key} are left")
        self._check_uncached(key)
        for stored in self._world.disk.blocks.values() if self._world.disk else ():
            require(not is_of(stored.prefix, key), Invariant.QUIESCENT, f"{key} can be read")

    def during_deletion(self, key: AdapterKey) -> None:
        """From the moment of the deletion only those go on that run."""
        left = [o.request for o in self._world.ledger.live.values() if o.submitted.adapter == key]
        for request in left:
            require(request.lease, Invariant.DRAINS, f"{request.request_id} waits for {key}")
        if not left:
            self._check_uncached(key)

    def _check_uncached(self, key: AdapterKey) -> None:
        """Nothing that was computed under this adapter can be found."""
        for group in self._kv.groups:
            for prefix in group.cached._prefixes.values():
                require(prefix.namespace.adapter != key, Invariant.OWN_CONTENT, f"{key} is cached")
            for prefix in group.host.prefixes._prefixes.values():
                require(prefix.namespace.adapter != key, Invariant.OWN_CONTENT, f"{key} is on host")
        for slots in self._kv.disk.slots if self._kv.disk else ():
            for prefix in slots.prefixes._prefixes.values():
                require(not is_of(prefix, key), Invariant.OWN_CONTENT, f"{key} is on disk")

    def _check_drains(self) -> None:
        for order in self._world.ledger.live.values() if self._world.deadlines else ():
            adapter = order.submitted.adapter
            deadline = self._world.deadlines.get(adapter) if adapter else None
            require(
                deadline is None or deadline > self._world.now,
                Invariant.DRAINS,
                f"{order.submitted.request_id} runs on though {adapter} is deleted",
            )

    def are_pins_settled(self) -> bool:
        """Whether every pin in force is on the device, but for those that never fit."""
        manager, sizes = self._engine.manager, self._world.scenario.adapter_sizes
        return all(
            manager.tier(key) is Tier.DEVICE or sizes[key] > self._engine.arena.capacity
            for key in manager._demand.pins
        )

    def _check_blocks(self, live: list[Request]) -> None:
        running = [request for request in live if request in self._scheduler._running]
        for group in range(self._num_groups):
            held = set(chain.from_iterable(blocks_of(request.kv)[group] for request in running))
            held.discard(0)
            require(
                len(held) + self._kv.num_free(group) == self._kv.num_usable(group),
                Invariant.BLOCKS_CONSERVED,
                f"group {group}: {len(held)} held + {self._kv.num_free(group)} free",
            )
        for request in live:
            if request in self._scheduler._running:
                is_right, what = not self._num_spare(request), "keeps the blocks of its draft"
            else:
                is_right, what = not any(map(any, blocks_of(request.kv))), "waits and holds blocks"
            if not is_right:
                detail = f"{request.request_id} {what}: {tables_of(request.kv)}"
                raise Violation(Invariant.BLOCKS_CONSERVED, detail)

    def _check_memory(self) -> None:
        """What is taken never exceeds the memory, at whatever moment of a move."""
        bounds, arena = self._world.scenario.border, self._engine.arena
        if bounds is None:
            return
        touched = self._engine.device.touched[0]
        gives_end = self._kv.groups[0].layout.gives_end
        taken = (max(touched, default=0) if gives_end else len(touched)) * BLOCK_BYTES
        taken += arena.capacity * arena.element_bytes
        require(taken <= bounds.total, Invariant.MEMORY, f"{taken} of {bounds.total} bytes")

    def _check_host_memory(self) -> None:
        """Adapters and KV blocks together never have more than the memory, and each side has its
        floor."""
        shared, host = self._world.scenario.host_memory, self._engine.host
        if shared is None:
            return
        bounds, num_slots = shared.bounds, self._kv.groups[shared.group].host.num_slots
        taken = host.capacity_bytes + num_slots * shared.slot_bytes
        require(taken <= bounds.total, Invariant.MEMORY, f"{taken} of {bounds.total} bytes")
        require(host.used <= host.capacity, Invariant.MEMORY, f"{host.used} cells on the host")
        require(
            host.capacity_bytes >= bounds.least_adapters
            and num_slots >= bounds.least_kv // shared.slot_bytes,
            Invariant.MEMORY,
            f"adapters have {host.capacity_bytes} bytes, KV blocks {num_slots} slots: {bounds}",
        )

    def _check_leases(self, live: list[Request]) -> None:
        mine = {request.request_id for request in live if request.lease}
        mine |= self._scheduler._leases.late.keys()
        held = self._engine.manager._leases.keys()
        require(mine == held, Invariant.LEASES_LIVE, f"{sorted(mine ^ held)}")
        num_reaped = self._engine.manager._leases.num_reaped
        require(not num_reaped, Invariant.LEASES_LIVE, f"{num_reaped} leases had to be reaped")

    def _check_delivery(self, live: list[Request]) -> None:
        """The API server has each request's tokens, which it counts when it receives them."""
        for request in live:
            name, num_tokens = request.request_id, request.num_generated_tokens
            delivered = self._engine.delivered[name]
            require(
                delivered == num_tokens,
                Invariant.DELIVERED,
                f"{name}: {num_tokens} generated, {delivered} delivered",
            )

    def after_crash(self, request_id: str) -> None:
        """The device died of this request, in whichever step in flight."""
        suspects = self._engine.suspects
        require(request_id in suspects, Invariant.SUSPECTS, f"{request_id}, not {sorted(suspects)}")

    def _check_progress(self, batch: ScheduledBatch | None) -> None:
        for request, wait in self._scheduler._disk_reads._waits.items():
            require(
                self._world.now < wait.until and any(map(self._is_coming, wait.places)),
                Invariant.PROGRESS,
                f"{request.request_id} waits for the disk in vain",
            )
        schedule, has_read = self._engine.schedule, self._engine.has_read
        if batch or has_read or schedule.failed or not self._world.ledger.live:
            self._num_idle_steps = 0
            return
        require(not self._scheduler.num_running, Invariant.PROGRESS, "who runs is not scheduled")
        ready = [
            order.submitted.request_id
            for order in self._contenders()
            if self._is_adapter_ready(order.submitted.adapter)
        ]
        self._num_idle_steps = self._num_idle_steps + 1 if ready else 0
        require(self._num_idle_steps < 2, Invariant.PROGRESS, f"{ready} wait and nothing runs")

    def _is_coming(self, place: Place) -> bool:
        """Whether this prefix is being read."""
        group, key = place
        return any(prefix.key == key for prefix in self._kv.groups[group].host.filling.values())

    def _count_window_frees(self, live: list[Request]) -> None:
        for request in live:
            num_freed = sum(request.kv.num_freed)
            before = self._num_left.get(request.request_id, 0)
            if num_freed != before:
                self._num_left[request.request_id] = num_freed
                self.num_window_frees += num_freed > before

    def _is_adapter_ready(self, key: AdapterKey | None) -> bool:
        """The base always is. An adapter that another one's window evicts cannot be leased."""
        if key is None:
            return True
        manager = self._engine.manager
        if manager.tier(key) is not Tier.DEVICE or manager.failure(key):
            return False
        record = manager._records.resident(key)
        return record is not None and not manager._planner.is_leaving(record)

    # --- audits ---------------------------------------------------------------------------------

    def audit(self) -> None:
        """Let every part check its books, and look at every lease and cached block."""
        live = [order.request for order in self._world.ledger.live.values()]
        try:
            self._kv.check_integrity([request.kv for request in live])
            self._engine.arena.extents.check()
        except AssertionError as error:
            raise Violation(Invariant.BLOCKS_CONSERVED, str(error)) from error
        self.costs.check(live)
        for request in live:
            if request.lease:
                is_right = self._has_its_adapter(request, request.lease)
                require(is_right, Invariant.LEASE_IS_ROW, f"{request.lease}")

    def _audit_cache(self, operations: Iterable[KvOperation]) -> None:
        """Before a step runs, what is cached is complete and is what its key says, but for what
        these operations and those on their way move."""
        device = self._engine.device
        moving = moved(operations) + device.on_the_way
        for index, group in enumerate(self._kv.groups):
            for block_id, prefix in group.cached._prefixes.items():
                require(
                    group.layout.window
                    or not prefix.parent
                    or prefix.parent in group.cached._block_by_key,
                    Invariant.LEAVES_FIRST,
                    f"block {block_id} of group {index} is cached, the one before it is not",
                )
                if (SwapIn, index, block_id) not in moving:
                    self._audit_prefix(group, prefix, device.block(index, block_id))
            for slot, prefix in group.host.prefixes._prefixes.items():
                if (SwapOut, index, slot) not in moving:
                    self._audit_prefix(
                        group, prefix, device.slots[index][device.place(index, slot)]
                    )
        self._audit_disk()

    def _audit_disk(self) -> None:
        """What is found on disk is there, as its key says, unless it is written anew."""
        disk = self._kv.disk
        for group, slots in enumerate(disk.slots if disk else ()):
            for slot, prefix in slots.prefixes._prefixes.items():
                assert self._world.disk is not None, "the engine has one"
                stored = self._world.disk.blocks.get((group, slot))
                require(
                    stored is not None and stored.prefix == prefix,
                    Invariant.OWN_CONTENT,
                    f"slot {slot} of group {group} on disk has not {prefix}",
                )
                if stored is not None:
                    self._audit_prefix(self._kv.groups[group], prefix, stored.values)

    def _audit_prefix(self, group: GroupBlocks, prefix: Prefix, found: list[int]) -> None:
        """What was found of a cached prefix is what its key says."""
        named = (prefix.namespace, prefix.parent, prefix.token_ids)
        known = self._named.setdefault(prefix.key, named)
        require(known == named, Invariant.OWN_CONTENT, f"{known} and {named} share a key")
        before = self._ends.get(prefix.parent) if prefix.parent else None
        if prefix.parent and before is None:
            return  # evicted before it was ever seen
        values = values_of_block(prefix.namespace, before, prefix.token_ids)
        position = (before.position if before else 0) + len(values)
        self._ends[prefix.key] = End(position, values[-1])
        if group.layout.holds_states:
            found, values = found[:1], values[-1:]
        require(
            found == values,
            Invariant.PUBLISHED_LATE,
            f"{prefix} of group {group.index} is published with {found}, not {values}",
        )

    def _watched(
        self, host: HostSlots, store: Callable[[Prefix], int | None]
    ) -> Callable[[Prefix], int | None]:
        """Let a tenant with its part of these slots displace nobody else's prefix."""
        prefixes = host.prefixes

        def watched(prefix: Prefix) -> int | None:
            most = max(int(self._limits.tenant_cap * host.num_slots), 1)
            tenant_id = prefix.namespace.tenant_id
            num_own, num_all = len(prefixes.slots_of(tenant_id)), len(prefixes)
            slot = store(prefix)
            num_others = len(prefixes) - len(prefixes.slots_of(tenant_id))
            require(
                num_own < most or num_others == num_all - num_own,
                Invariant.SHARES,
                f"{tenant_id} has {num_own} of {host.num_slots} slots and displaces others",
            )
            return slot

        return watched

    def num_leaked(self) -> int:
        """What is still held though every request has ended."""
        self.audit()
        engine = self._engine
        blocks = sum(
            self._kv.num_usable(group) - self._kv.num_free(group)
            for group in range(self._num_groups)
        )
        queued = self._scheduler.num_waiting + self._scheduler.num_running
        leases = len(engine.manager._leases) + (not engine.pipeline.is_empty)
        return blocks + queued + leases + len(engine.host.in_use) + len(self._world.deleting)


def _length(submitted: GenerationRequest) -> int:
    return len(submitted.prompt_token_ids) + submitted.sampling.max_tokens
