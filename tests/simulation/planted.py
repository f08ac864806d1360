"""Injected defects that this simulation must detect: one switch each, in test code only.

Each replaces a piece of the code under test by a version with a plausible error. The simulation is
only as good as the number of these defects that it detects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from loraplex.adapters.arena_planner import ArenaPlanner
from loraplex.adapters.byte_shares import Surplus
from loraplex.adapters.claims import Claims
from loraplex.adapters.erasures import Erasures
from loraplex.adapters.eviction_policy import EvictionPolicy, Newcomer
from loraplex.adapters.extents import Extent, Placement
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.leases import Leases
from loraplex.adapters.manager import AdapterManager, Lease
from loraplex.adapters.moves import Moves
from loraplex.adapters.record import Departure, Record, State
from loraplex.adapters.retirements import Retirements
from loraplex.engine.execution.execution import Execution
from loraplex.engine.execution.pipeline import Pipeline, StepsInFlight
from loraplex.engine.kv.block_pool import BlockPool
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.disk_slots import DiskSlots
from loraplex.engine.kv.disk_tier import DiskTier, WasRead
from loraplex.engine.kv.group_blocks import GroupBlocks
from loraplex.engine.kv.host_slots import HostPrefixes, HostSlots
from loraplex.engine.kv.layout import (
    GiveBackBlocks,
    KvGroup,
    KvOperation,
    OperationLog,
    SwapIn,
    SwapOut,
    ToDisk,
    ZeroBlocks,
)
from loraplex.engine.kv.prefix_cache import CachedBlocks, CacheNamespace, Prefix, PrefixHasher
from loraplex.engine.kv.sequence_blocks import BlockTable, SequenceBlocks, block_table
from loraplex.engine.kv.shared_prefixes import SharedPrefixes
from loraplex.engine.kv.state_blocks import StateBlocks
from loraplex.engine.memory.border import Border
from loraplex.engine.memory.host_border import HostBorder
from loraplex.engine.request import Request
from loraplex.engine.scheduling.adapter_leases import AdapterLeases
from loraplex.engine.scheduling.admission_planner import AdmissionPlanner
from loraplex.engine.scheduling.background import BackgroundRequests
from loraplex.engine.scheduling.backlog import Backlog
from loraplex.engine.scheduling.batch import ScheduledSequence, Step
from loraplex.engine.scheduling.candidates import Visit
from loraplex.engine.scheduling.deadlines import Deadlines
from loraplex.engine.scheduling.disk_reads import DiskReads
from loraplex.engine.scheduling.drains import Drains
from loraplex.engine.scheduling.fairness import VirtualTokenCounters
from loraplex.engine.scheduling.groups import Groups
from loraplex.engine.scheduling.preemption import Preemption
from loraplex.engine.scheduling.queue_limits import QueueLimits
from loraplex.engine.scheduling.running import Running
from loraplex.engine.scheduling.scheduler import Schedule, Scheduler
from loraplex.engine.scheduling.step_costs import StepCosts
from loraplex.engine.scheduling.waiting import WaitingQueue
from loraplex.engine.speculation.remembered_outputs import RememberedOutputs

from .device import FakeDevice
from .runner import STEPS_PER_SEED, process_pool, run_seed

MAX_STEPS = 1_000_000
"""A mistake must be found within so many steps."""

LIKELY_SEEDS = {
    "believes_what_was_not_read": 29,
    "charges_again_what_is_computed_again": 4,
    "compacts_in_place": 4,
    "confirms_deletions_before_the_bytes_are_zero": 5,
    "counts_half_a_slot_as_one": 73,
    "deletes_adapters_under_a_step_in_flight": 19,
    "displaces_under_a_step_in_flight": 9,
    "drains_without_a_deadline": 3,
    "ends_leases_under_a_step_in_flight": 3,
    "evicts_pinned_adapters_for_the_cache": 12,
    "forgets_that_somebody_asked_for_a_stay": 5,
    "forgets_the_parent": 14,
    "forks_states_that_went_on": 22,
    "gives_back_the_blocks_of_the_next_step": 5,
    "gives_the_arena_what_waits_for_the_next_step": 199,
    "gives_host_slots_back_before_they_are_read": 4,
    "goes_on_in_a_snapshot": 2,
    "hits_without_states": 2,
    "holds_a_prefix_on_the_host_while_it_waits": 3,
    "leases_what_moves": 89,
    "moves_slots_that_are_filled": 88,
    "moves_without_a_new_row": 11,
    "preempts_for_drafts": 8,
    "preempts_under_a_step_in_flight": 10,
    "promises_blocks_twice": 3,
    "publishes_a_step_in_flight": 2,
    "reads_the_last_step_first": 5,
    "reaps_a_lease_that_lives": 3,
    "runs_a_request_in_two_stages": 5,
    "suspects_nobody_of_the_step_before": 87,
    "swaps_a_snapshot_of_the_states": 12,
    "takes_a_failed_erasure_for_done": 7,
    "takes_requests_while_it_drains": 6,
}
"""For mistakes that are found late from seed 0 on: a seed that found them, which is tried first.

If it no longer does, because a change alters what seeds draw, the search takes longer.
"""

MISTAKES: dict[str, Callable[[], Any]] = {}
"""By name, what makes the context manager that plants it."""


def is_caught(name: str) -> str | None:
    """How many steps it took and what was seen; None if nothing was."""
    num_steps = 0
    likely = [LIKELY_SEEDS[name]] if name in LIKELY_SEEDS else []
    with MISTAKES[name]():
        for seed in (*likely, *range(MAX_STEPS // STEPS_PER_SEED)):
            outcome = run_seed(seed)
            num_steps += outcome.num_steps
            if outcome.violation:
                return f"after {num_steps} steps: {outcome.violation}"
    return None


def search_all(*, num_processes: int | None = None) -> Iterator[tuple[str, str | None]]:
    """The name of each mistake and what `is_caught` says of it."""
    with process_pool(num_processes) as pool:
        yield from zip(MISTAKES, pool.imap(is_caught, MISTAKES), strict=True)


def _plant(owner: type, attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the mistaken version of a method, class method or property.

    It is called with the correct version in front of its own arguments; its docstring is what the
    author of the mistake thought.
    """

    def decorate(mistaken: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def planted() -> Iterator[None]:
            correct = owner.__dict__[attribute]
            if isinstance(correct, property):
                get = correct.fget
                new: Any = property(lambda self: mistaken(get, self))
            elif isinstance(correct, classmethod):
                make = correct.__get__(None, owner)
                new = staticmethod(lambda *args, **kwargs: mistaken(make, *args, **kwargs))
            else:

                def new(*args: Any, **kwargs: Any) -> Any:
                    return mistaken(correct, *args, **kwargs)

            with mock.patch.object(owner, attribute, new):
                yield

        MISTAKES[mistaken.__name__] = planted
        return mistaken

    return decorate


# --- prompts --------------------------------------------------------------------------------------


@_plant(Request, "num_reusable_tokens")
def reads_behind_a_cached_prefix(correct: Any, request: Request) -> int:
    """What is in the cache need not be computed."""
    return len(request.token_ids)


@_plant(Step, "room_for")
def all_rows_may_be_read(correct: Any, step: Step, request: Request) -> int:
    """The token budget bounds the logits too."""
    return min(request.num_remaining_tokens, step.budget)


@_plant(Execution, "_read")
def reads_again_after_a_preemption(correct: Any, execution: Any, *args: Any) -> bool:
    """Whoever begins anew reads anew."""
    sequence = args[0]
    request, before = sequence.request, sequence.request.unread
    if request.num_preemptions and request.unread.start and not sequence.start:
        request.unread = range(0, before.stop)
    return bool(correct(execution, *args))


# --- background requests --------------------------------------------------------------------------


@_plant(BackgroundRequests, "in_front")
def lets_background_requests_go_on(correct: Any, background: Any) -> list[Request]:
    """Whoever runs already may finish."""
    return []


@_plant(Scheduler, "_place_background")
def runs_background_requests_in_free_places(correct: Any, scheduler: Any, step: Step) -> None:
    """A free place costs nobody anything."""
    if scheduler._running.is_full:
        correct(scheduler, step)
        return
    for request in scheduler._background.forward():
        scheduler._offer(request)


@_plant(Scheduler, "_check_queue")
def counts_background_requests_as_queued(correct: Any, scheduler: Any, request: Any) -> None:
    """Whoever waits is in the queue."""
    back = scheduler._background
    with mock.patch.object(back, "in_front", list):
        correct(scheduler, request)


# --- blocks -------------------------------------------------------------------------------------


@_plant(BlockPool, "free")
def skips_a_decref(free: Any, self: BlockPool, block_ids: list[int]) -> Any:
    """The last block is only half full, it will be needed again."""
    return free(self, block_ids[:-1] if len(block_ids) > 3 else block_ids)


@_plant(BlockPool, "share")
def shares_without_incref(share: Any, self: BlockPool, block_ids: Iterator[int]) -> Any:
    """Whoever has been counted once is safe."""
    return share(self, [block_id for block_id in block_ids if not self.ref_count(block_id)])


@_plant(BlockPool, "share")
def leaves_shared_blocks_on_the_free_list(
    share: Any, self: BlockPool, block_ids: Iterator[int]
) -> Any:
    """The count alone says who is free."""
    free, self._free = self._free, self._free.copy()
    meters = share(self, block_ids)
    self._free = free
    return meters


@_plant(KvBlocks, "release")
def forgets_what_was_swapped(release: Any, self: KvBlocks, seq: SequenceBlocks) -> None:
    """A sequence in the host's memory has no blocks to give back."""
    if not seq.is_swapped:
        release(self, seq)


@_plant(OperationLog, "take")
def hands_out_blocks_as_they_are(take: Any, self: OperationLog) -> list[KvOperation]:
    """They are overwritten anyway."""
    return [operation for operation in take(self) if not isinstance(operation, ZeroBlocks)]


@_plant(GroupBlocks, "_is_shared")
def writes_shared_blocks_in_place(is_shared: Any, self: GroupBlocks, block_id: int) -> bool:
    """Forks have the same prompt, so they write the same."""
    return False


@_plant(GroupBlocks, "allocate_targets")
def compacts_in_place(allocate: Any, self: GroupBlocks, seq: SequenceBlocks) -> BlockTable:
    """What stays has room in the sequence's first blocks."""
    assert seq.eviction is not None
    return seq.tables[self.index][: seq.eviction.num_target_blocks]


@_plant(KvGroup, "first_visible_block")
def frees_a_window_too_early(first: Any, self: KvGroup, num_computed: int, block_size: int) -> int:
    """Rounded up, for the block behind the window."""
    if self.window is None:
        return 0
    return -(-max(self.window.first_visible(num_computed) - 1, 0) // block_size)


@_plant(KvGroup, "first_visible_block")
def frees_the_present_chunk(first: Any, self: KvGroup, num_computed: int, block_size: int) -> int:
    """A block in which a chunk begins belongs to the chunk before."""
    if self.window is None or not self.window.is_chunked:
        result: int = first(self, num_computed, block_size)
        return result
    return -(-self.window.first_visible(num_computed) // block_size)


@_plant(GroupBlocks, "leave_behind")
def frees_the_sinks(leave: Any, self: GroupBlocks, seq: SequenceBlocks, num_computed: int) -> None:
    """Behind the window nothing is seen."""
    sinks, self.num_sink_blocks = self.num_sink_blocks, 0
    leave(self, seq, num_computed)
    self.num_sink_blocks = sinks


@_plant(StateBlocks, "can_fork")
def forks_states_that_went_on(
    can_fork: Any, self: StateBlocks, parent: SequenceBlocks, num_tokens: int
) -> bool:
    """Both have the same tokens up to here."""
    return len(parent.tables[self.index]) * self._block_size >= num_tokens


@_plant(StateBlocks, "_to_swap")
def swaps_a_snapshot_of_the_states(
    to_swap: Any, self: StateBlocks, seq: SequenceBlocks, num_blocks: int
) -> list[int]:
    """The block before is full, so it is the one that counts."""
    table = seq.tables[self.index]
    has_snapshot = num_blocks > 1 and table.item(num_blocks - 2)
    return [num_blocks - 2] if has_snapshot else to_swap(self, seq, num_blocks)


@_plant(GroupBlocks, "num_seen")
def hits_without_states(num_seen: Any, self: GroupBlocks, num_blocks: int) -> int:
    """The first tokens after a hit bring the states with them."""
    return 0 if self.layout.holds_states else num_seen(self, num_blocks)


@_plant(StateBlocks, "grow")
def goes_on_in_a_snapshot(
    grow: Any, self: StateBlocks, seq: SequenceBlocks, num_computed: int, num_tokens: int
) -> None:
    """The states before are not needed any more."""
    table = seq.tables[self.index]
    before = table.item(-1) if len(table) else 0
    grow(self, seq, num_computed, num_tokens)
    after = seq.tables[self.index]
    if before and len(after) > len(table) and not self._is_shared(before):
        self.pool.free([after.item(-1)])
        seq.tables[self.index] = block_table([*after.tolist()[:-1], before])
        self.pool.share([before])


@_plant(HostSlots, "give_back")
def keeps_host_slots(give_back: Any, self: HostSlots, slots: Any) -> None:
    """There is more host memory than anyone needs."""


@_plant(KvBlocks, "_swap_in")
def swaps_in_backwards(swap_in: Any, self: KvBlocks, seq: SequenceBlocks) -> None:
    """Slots are as good as each other."""
    for slots in seq.host_slots:
        slots.update(zip(list(slots), reversed(list(slots.values())), strict=True))
    swap_in(self, seq)


@_plant(OperationLog, "take")
def swaps_out_too_late(take: Any, self: OperationLog) -> list[KvOperation]:
    """Copies to the host can wait for the end of the step's operations."""
    return sorted(take(self), key=lambda operation: isinstance(operation, SwapOut | SwapIn))


# --- prefixes on the host -------------------------------------------------------------------------


@_plant(HostSlots, "find")
def finds_host_blocks_by_their_tokens(find: Any, self: HostSlots, prefix: Prefix) -> int | None:
    """The namespace is in the key of the block before."""
    for slot, stored in self.prefixes._prefixes.items():
        is_as_deep = bool(stored.parent) == bool(prefix.parent)
        if is_as_deep and stored.token_ids == prefix.token_ids:
            return slot
    return None


@_plant(GroupBlocks, "swap_in")
def gives_host_slots_back_before_they_are_read(
    swap_in: Any, self: GroupBlocks, seq: SequenceBlocks
) -> None:
    """The copy is on its way."""
    slots, allocate = list(seq.host_slots[self.index].values()), self._allocate

    def allocate_late(count: int) -> list[int]:
        self.host.give_back(slots)
        block_ids = allocate(count)
        self.host.share(slots)
        return block_ids

    with mock.patch.object(self, "_allocate", allocate_late):
        swap_in(self, seq)


@_plant(HostPrefixes, "forget")
def finds_what_a_host_slot_stored_before(forget: Any, self: HostPrefixes, block_id: int) -> bool:
    """It will be stored anew."""
    return block_id in self._prefixes


@_plant(KvBlocks, "drop_adapter")
def keeps_prefixes_of_deleted_adapters_on_the_host(
    drop: Any, self: KvBlocks, key: AdapterKey
) -> int:
    """Host memory is reused soon."""
    return sum(len(group.cached.drop_adapter(key)) for group in self.groups)


@_plant(RememberedOutputs, "forget")
def keeps_outputs_of_deleted_adapters(
    forget: Any, self: RememberedOutputs, adapter: AdapterKey, now: float
) -> None:
    """An hour later they are dropped anyway."""


@_plant(HostSlots, "_make_room")
def lets_a_tenant_fill_the_host(make_room: Any, self: HostSlots, tenant_id: str) -> bool:
    """Who asks most needs most."""
    return self.num_free > 0


@_plant(AdmissionPlanner, "_forget")
def holds_a_prefix_on_the_host_while_it_waits(
    forget: Any, self: AdmissionPlanner, request: Request
) -> None:
    """It is like a request that was swapped out."""
    request.kv.num_to_fetch = 0
    forget(self, request)


@_plant(OperationLog, "keep")
def keeps_the_content_of_the_new_owner(
    keep: Any, self: OperationLog, group: int, block_id: int, host_slot: int
) -> None:
    """Zeros and copies commute."""
    self.zero(group, [block_id])
    self.add(SwapOut(group, (block_id,), (host_slot,)))


# --- prefixes on disk -----------------------------------------------------------------------------


@_plant(DiskTier, "find")
def finds_disk_blocks_by_their_tokens(
    find: Any, self: DiskTier, group: int, prefix: Prefix
) -> int | None:
    """The namespace is in the key of the block before."""
    for slot, stored in self.slots[group].prefixes._prefixes.items():
        is_as_deep = bool(stored.parent) == bool(prefix.parent)
        if is_as_deep and stored.token_ids == prefix.token_ids:
            return slot
    return None


@_plant(DiskTier, "_end_read")
def believes_what_was_not_read(end: Any, self: DiskTier, done: WasRead) -> None:
    """A disk seldom fails."""
    end(self, done._replace(is_right=True))


@_plant(DiskTier, "_end_write")
def finds_what_was_not_written(
    end: Any, self: DiskTier, group: int, disk_slot: int, *, is_right: bool
) -> None:
    """A disk seldom fails."""
    end(self, group, disk_slot, is_right=True)


@_plant(DiskTier, "_is_doomed")
def finds_what_was_under_way_when_its_adapter_was_deleted(
    is_doomed: Any, self: DiskTier, prefix: Prefix
) -> bool:
    """It was asked for before."""
    return False


@_plant(DiskTier, "is_erasing")
def gives_the_receipt_before_the_disk_has_erased(
    is_erasing: Any, self: DiskTier, adapter: AdapterKey
) -> bool:
    """It will soon have."""
    return False


@_plant(KvBlocks, "erase_on_disk")
def keeps_prefixes_of_deleted_adapters_on_disk(erase: Any, self: KvBlocks, key: AdapterKey) -> None:
    """They are encrypted."""


@_plant(HostSlots, "_make_room")
def lets_a_tenant_fill_the_disk(make_room: Any, self: HostSlots, tenant_id: str) -> bool:
    """Who asks most needs most."""
    if isinstance(self, DiskSlots):
        return self.num_free > 0
    has_room: bool = make_room(self, tenant_id)
    return has_room


@_plant(OperationLog, "take")
def copies_for_the_disk_before_all_else(take: Any, self: OperationLog) -> list[KvOperation]:
    """Then they are under way sooner."""
    return sorted(take(self), key=lambda operation: not isinstance(operation, ToDisk))


@_plant(DiskTier, "read")
def reads_into_a_slot_that_nobody_holds(
    read: Any, self: DiskTier, group: int, prefix: Prefix
) -> Any:
    """It is empty."""
    place = read(self, group, prefix)
    host = self._groups[group].host
    for slot, own in host.filling.items():
        if own == prefix and host._pool.ref_count(slot):
            host.give_back([slot])
    return place


@_plant(DiskReads, "_ends")
def waits_for_the_disk_however_long_it_takes(
    ends: Any, self: DiskReads, request: Request, wait: Any
) -> bool:
    """Reading is always sooner."""
    ended: bool = ends(self, request, wait._replace(until=float("inf")))
    return ended


# --- steps in flight ------------------------------------------------------------------------------


@_plant(FakeDevice, "launch_operations")
def reuses_blocks_before_the_step_in_flight_has_read_them(
    launch: Any, self: FakeDevice, operations: Any
) -> None:
    """Copies have a stream of their own."""
    launch(self, operations)
    self._queue.pop()()


@_plant(AdapterLeases, "give_back")
def ends_leases_under_a_step_in_flight(give_back: Any, self: AdapterLeases, request: Any) -> None:
    """Whoever has ended needs no adapter."""
    self._manager.release(request.request_id)
    request.lease = None


@_plant(Drains, "begin")
def deletes_adapters_under_a_step_in_flight(
    begin: Any, self: Drains, key: AdapterKey, drain_seconds: float
) -> None:
    """Its requests have ended."""
    begin(self, key, drain_seconds)
    late = self._scheduler._leases.late
    for name in [name for name, request in late.items() if request.adapter == key]:
        del late[name]
        self._manager.release(name)


@_plant(Execution, "_is_current")
def answers_on_after_a_stop(is_current: Any, self: Execution[Any], sequence: Any) -> bool:
    """The step in flight has computed the row."""
    request = sequence.request
    if request.has_ended and request.token_ids[-1] in request.end_token_ids:
        return self._runner.is_current(sequence)
    found: bool = is_current(self, sequence)
    return found


@_plant(Execution, "_is_current")
def answers_on_after_a_cancel(is_current: Any, self: Execution[Any], sequence: Any) -> bool:
    """Its caller will not mind."""
    request = sequence.request
    is_unfinished = request.token_ids[-1] not in request.end_token_ids
    if request.has_ended and is_unfinished and request.num_pending_tokens:
        return self._runner.is_current(sequence)
    found: bool = is_current(self, sequence)
    return found


@_plant(Execution, "_announce")
def delivers_tokens_a_step_late(
    announce: Any, self: Execution[Any], request: Any, path: Any, generated: Any
) -> Any:
    """Two steps are in flight: there is time until the next one is read."""
    late = vars(self).setdefault("late", {})
    requests = self._requests
    with mock.patch.object(requests, "generate"):
        drawn = announce(self, request, path, generated)
    if before := late.pop(request, None):
        requests.generate(request, before)
    late[request] = generated
    return drawn


@_plant(Pipeline, "run")
def suspects_nobody_of_the_step_before(run: Any, self: Pipeline[Any], sequences: Any) -> None:
    """Whatever runs last has done it."""
    ids = [sequence.request.request_id for sequence in sequences]
    on_launch = self._on_launch

    def name_the_last(_request_ids: Any) -> None:
        on_launch(ids)

    with mock.patch.object(self, "_on_launch", name_the_last):
        run(self, sequences)


@_plant(Scheduler, "_schedule_decodes")
def runs_a_request_in_two_stages(decodes: Any, self: Scheduler, step: Any) -> Any:
    """The next token is on the device when the next step begins."""
    limits = replace(self.limits, max_concurrent_batches=1)
    with mock.patch.object(self, "limits", limits):
        return decodes(self, step)


@_plant(StepsInFlight, "finish_first")
def reads_the_last_step_first(finish: Any, self: StepsInFlight[Any]) -> None:
    """All of them have been launched."""
    self._steps.reverse()
    finish(self)
    self._steps.reverse()


@_plant(Scheduler, "note_launch")
def publishes_a_step_in_flight(launch: Any, self: Scheduler, sequences: Any) -> None:
    """What is launched will be computed."""
    launch(self, sequences)
    for sequence in sequences:
        request = sequence.request
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        self._kv.advance(request.kv, request.namespace, request.token_ids, num_known)


@_plant(Scheduler, "take")
def gives_back_the_blocks_of_the_next_step(take: Any, self: Scheduler, outputs: Any) -> None:
    """More blocks than computed tokens need are those of rejected draft tokens."""
    take(self, outputs)
    for sequence, *_ in outputs:
        kv, num_computed = sequence.request.kv, sequence.request.num_computed_tokens
        if kv.num_writable - num_computed > self.limits.block_size:
            self._kv.shrink(kv, num_computed + 1)


@_plant(Preemption, "make_room")
def preempts_under_a_step_in_flight(
    make_room: Any, self: Preemption, request: Request, num_tokens: int, step: Step
) -> bool:
    """The device executes everything in order."""
    is_ahead, step.is_ahead = step.is_ahead, False
    has_room: bool = make_room(self, request, num_tokens, step)
    step.is_ahead = is_ahead
    return has_room


# --- prefix cache -------------------------------------------------------------------------------


@_plant(Scheduler, "schedule")
def publishes_early(schedule: Any, self: Scheduler) -> Schedule:
    """What is scheduled will be computed."""
    result: Schedule = schedule(self)
    for request, num_tokens, *_ in result.batch.sequences if result.batch else ():
        num_computed = request.num_computed_tokens + num_tokens
        self._kv.advance(request.kv, request.namespace, request.token_ids, num_computed)
    return result


@_plant(PrefixHasher, "prefix")
def drops_the_tenant_from_the_key(
    prefix: Any, self: PrefixHasher, chain: Any, index: int, namespace: CacheNamespace, tokens: Any
) -> Prefix:
    """Digests are unique anyway."""
    shared = CacheNamespace("", namespace.runtime_id, namespace.adapter, namespace.label)
    found: Prefix = prefix(self, chain, index, shared, tokens)
    return found


@_plant(PrefixHasher, "prefix")
def drops_the_adapter_from_the_key(
    prefix: Any, self: PrefixHasher, chain: Any, index: int, namespace: CacheNamespace, tokens: Any
) -> Prefix:
    """The prompt is the same, whatever the adapter."""
    shared = CacheNamespace(namespace.tenant_id, namespace.runtime_id, None, namespace.label)
    found: Prefix = prefix(self, chain, index, shared, tokens)
    return found


@_plant(PrefixHasher, "prefix")
def drops_the_rotary_context_from_the_key(
    prefix: Any, self: PrefixHasher, chain: Any, index: int, namespace: CacheNamespace, tokens: Any
) -> Prefix:
    """The prompt is the same, however long its answer may be."""
    found: Prefix = prefix(self, chain, index, replace(namespace, rotary_start=0), tokens)
    return found


@_plant(PrefixHasher, "prefix")
def drops_the_start_from_the_key(
    prefix: Any, self: PrefixHasher, chain: Any, index: int, namespace: CacheNamespace, tokens: Any
) -> Prefix:
    """The tokens of the invocation are in the key."""
    found: Prefix = prefix(self, chain, index, replace(namespace, adapter_start=0), tokens)
    return found


@_plant(CacheNamespace, "of_block")
def gives_the_block_of_the_invocation_to_the_base(
    of_block: Any, self: CacheNamespace, end: int
) -> CacheNamespace:
    """The adapter acts on the tokens after the first."""
    found: CacheNamespace = of_block(self, max(end - 1, 0) if self.adapter_start else end)
    return found


@_plant(ScheduledSequence, "of")
def leases_where_a_chunk_begins(
    of: Any, request: Request, num_tokens: int, num_draft_tokens: int = 0
) -> ScheduledSequence:
    """A chunk that begins before the adapter's start is the base's."""
    sequence: ScheduledSequence = of(request, num_tokens, num_draft_tokens)
    is_of_base = sequence.start < request.adapter_start
    return sequence._replace(lease=None) if is_of_base else sequence


@_plant(PrefixHasher, "prefix")
def memorizes_adapters_by_name(
    prefix: Any, self: PrefixHasher, chain: Any, index: int, namespace: CacheNamespace, tokens: Any
) -> Prefix:
    """The digest names the adapter, so one memo serves all."""
    memo = self.__dict__.setdefault("_memo", {})
    adapter = namespace.adapter
    namespace = memo.setdefault(adapter.digest, namespace) if adapter else namespace
    found: Prefix = prefix(self, chain, index, namespace, tokens)
    return found


@_plant(PrefixHasher, "key")
def forgets_the_parent(
    key: Any, self: PrefixHasher, namespace: CacheNamespace, parent: bytes, tokens: tuple[int, ...]
) -> bytes:
    """A block's tokens say what it holds."""
    found: bytes = key(self, namespace, b"", tokens)
    return found


@_plant(CachedBlocks, "forget")
def keeps_the_key_of_a_reused_block(forget: Any, self: CachedBlocks, block_id: int) -> bool:
    """It will be published anew."""
    return block_id in self._prefixes


@_plant(CachedBlocks, "drop_adapter")
def keeps_the_cache_of_deleted_adapters(
    drop: Any, self: CachedBlocks, adapter: AdapterKey
) -> list[int]:
    """Nobody can ask for it any more."""
    return []


@_plant(SharedPrefixes, "longest_hit")
def takes_the_whole_prompt_from_the_cache(
    hit: Any, self: SharedPrefixes, chain: Any, namespace: Any, tokens: Any
) -> int:
    """If all is there, nothing is left to compute."""
    found: int = hit(self, chain, namespace, [*tokens, 0])
    return found


# --- scheduler ----------------------------------------------------------------------------------


@_plant(Scheduler, "get")
def ignores_the_abort_of_a_choice(get: Any, self: Scheduler, request_id: str) -> Request | None:
    """Only requests of their own can be aborted."""
    request: Request | None = get(self, request_id)
    return None if request and request.submitted.group_id else request


@_plant(WaitingQueue, "remove")
def leaves_the_aborted_in_the_queue(remove: Any, self: WaitingQueue[Any], entry: Any) -> bool:
    """Their turn will not come."""
    return False


@_plant(Preemption, "preempt")
def lets_the_preempted_keep_their_lease(
    preempt: Any, self: Preemption, victim: Request, step: Step
) -> None:
    """It will be back at once."""
    with mock.patch.object(self._leases, "_manager", mock.Mock()):
        preempt(self, victim, step)


@_plant(Running, "of_lower_priority")
def displaces_other_tenants(
    of_lower_priority: Any, self: Running, request: Request
) -> list[Request]:
    """Who is urgent is urgent for all."""
    return [other for other in self.requests if other.priority > request.priority]


@_plant(Running, "of_lower_priority")
def displaces_the_equal(of_lower_priority: Any, self: Running, request: Request) -> list[Request]:
    """The older goes first."""
    requests = reversed(self.requests)
    return [other for other in requests if other.tenant_id == request.tenant_id]


@_plant(Preemption, "displace")
def displaces_under_a_step_in_flight(
    displace: Any, self: Preemption, request: Request, is_enough: Any, step: Step
) -> bool:
    """It will not be missed."""
    is_ahead, step.is_ahead = step.is_ahead, False
    has_displaced: bool = displace(self, request, is_enough, step)
    step.is_ahead = is_ahead
    return has_displaced


@_plant(Step, "cancel")
def computes_the_preempted(cancel: Any, self: Step, request: Request) -> None:
    """Who is in the step stays in it."""
    self.preempted.add(request)


@_plant(Step, "add")
def spends_no_budget(add: Any, self: Step, request: Request, num_tokens: int) -> None:
    """The budget is for decodes."""
    before = self._num_prefill_tokens
    add(self, request, num_tokens)
    self._num_prefill_tokens = before


@_plant(Visit, "offer_all")
def waits_for_absent_adapters(offer_all: Any, self: Visit[Any], may_run: Any) -> None:
    """A tenant's requests have an order."""
    offer_all(self, may_run)
    if self._parked:
        self._heap.clear()


@_plant(Scheduler, "_check_fits")
def admits_what_never_fits(check: Any, self: Scheduler, request: Request) -> None:
    """Others will make room."""


@_plant(Scheduler, "_check_queue")
def has_no_limit_on_the_queue(check: Any, self: Scheduler, request: Request) -> None:
    """Waiting costs nothing."""


@_plant(AdmissionPlanner, "_relief")
def has_no_cap(relief: Any, self: AdmissionPlanner, request: Request, cap: float) -> None:
    """Room that is free may be used."""


@_plant(Scheduler, "_bound_prefill")
def lets_prompts_delay_decodes(bound: Any, self: Scheduler, step: Step) -> None:
    """Full steps are the most efficient."""


@_plant(QueueLimits, "check")
def queues_what_cannot_begin_in_time(
    check: Any, self: QueueLimits, request: Request, **kw: Any
) -> None:
    """It may be faster than expected."""
    check(self, request, **{**kw, "patience_seconds": float("inf")})


@_plant(Backlog, "wait_seconds")
def makes_tenants_wait_for_each_other(
    wait: Any, self: Backlog, request: Request, running: Any, *, num_free: int
) -> float:
    """All of the queue is ahead of who comes last."""
    num_ends = max(self._num_requests + 1 - num_free, 0)
    outputs = num_ends * (self._output_tokens or 0.0)
    return self._costs.wait_seconds(self._num_prompt_tokens, int(outputs), running)


@_plant(Backlog, "wait_seconds")
def refuses_the_strict_for_the_lenient(
    wait: Any, self: Backlog, request: Any, running: Any, *, num_free: int
) -> float:
    """All of its tenant's queue is ahead of who comes last, whatever its target."""
    last = SimpleNamespace(tenant_id=request.tenant_id, due_time=float("inf"))
    found: float = wait(self, last, running, num_free=num_free)
    return found


@_plant(WaitingQueue, "defer")
def lets_nobody_pass_the_late(defer: Any, self: WaitingQueue[Any], entry: Any) -> None:
    """Who came first is served first."""


@_plant(WaitingQueue, "rank")
def starves_the_lenient(rank: Any, self: WaitingQueue[Any], entry: Any) -> float:
    """The strict class is first, however long the other waits."""
    targets = entry.targets
    return float(entry.due_time + 1e6 * (targets.ttft_seconds or 1e6))


@_plant(Scheduler, "_num_drafts_in_time")
def drafts_beyond_the_target(in_time: Any, self: Scheduler, step: Step) -> int:
    """Draft tokens make answers faster."""
    return step.budget


@_plant(Step, "target_itl_seconds")
def paces_all_by_the_lenient(target: Any, self: Step) -> float:
    """The mean of the class is what matters."""
    targets = [request.targets.itl_seconds for request in self.decodes]
    return max((each for each in targets if each is not None), default=float("inf"))


@_plant(WaitingQueue, "rank")
def lets_all_pass_the_late(rank: Any, self: WaitingQueue[Any], entry: Any) -> float:
    """It is lost anyway."""
    found: float = rank(self, entry) + 1e9 * entry.is_late
    return found


@_plant(Deadlines, "expired")
def forgets_deadlines(expired: Any, self: Deadlines[Any], now: float) -> list[str]:
    """Those that run have made it."""
    return []


@_plant(Groups, "_others")
def forks_from_who_is_not_ready(others: Any, self: Groups, request: Request) -> list[Any]:
    """Whoever of the group runs has the prompt."""
    return [_Computed(other) for other in others(self, request)]


class _Computed:
    """A request that passes for one whose prompt is computed."""

    def __init__(self, request: Request) -> None:
        self.kv = request.kv
        self.num_prompt_tokens = self.num_computed_tokens = request.num_prompt_tokens


@_plant(AdmissionPlanner, "_available")
def promises_blocks_twice(
    available: Any, self: AdmissionPlanner, request: Request, unfinished: Any
) -> list[int]:
    """One more than there are: something ends in every step."""
    return [count + 1 for count in available(self, request, unfinished)]


# --- speculation --------------------------------------------------------------------------------


@_plant(Scheduler, "take")
def counts_rejected_tokens_as_computed(take: Any, self: Scheduler, outputs: Any) -> None:
    """The step has computed them."""
    take(self, [(each, token_ids, each.num_draft_tokens) for each, token_ids, _ in outputs])


@_plant(Scheduler, "take")
def publishes_drafts(take: Any, self: Scheduler, outputs: Any) -> None:
    """Their blocks are full."""
    for sequence, *_ in outputs:
        request, end, num_drafts = sequence.request, sequence.context_len, sequence.num_draft_tokens
        if num_drafts:
            drafted = [*request.token_ids[: end - num_drafts], *request.draft.token_ids]
            self._kv.advance(request.kv, request.namespace, drafted, end)
    take(self, outputs)


@_plant(Execution, "_go_on")
def keeps_the_draft(go_on: Any, self: Execution[Any], entry: Any, *drawn: Any) -> None:
    """The next one replaces it."""
    request = entry.sequence.request
    draft = request.draft
    go_on(self, entry, *drawn)
    request.draft = draft


@_plant(Execution, "_without_draft")
def leaves_behind_what_is_not_finite(
    without: Any, self: Execution[Any], sequence: ScheduledSequence
) -> ScheduledSequence:
    """It is written again."""
    with mock.patch.object(self, "_runner", mock.Mock()):
        found: ScheduledSequence = without(self, sequence)
    return found


@_plant(Execution, "_num_until_end")
def answers_beyond_the_end(until: Any, self: Execution[Any], request: Request, tokens: Any) -> int:
    """They are drawn already."""
    return len(tokens)


@_plant(Scheduler, "_grow_drafts")
def preempts_for_drafts(grow: Any, self: Scheduler, step: Step) -> None:
    """More tokens in a step are worth it."""
    for request, num_tokens, *_ in step.drafting():
        if request not in step.preempted:
            self._preemption.make_room(request, num_tokens, step)


@_plant(KvBlocks, "shrink")
def keeps_blocks_for_the_next_drafts(
    shrink: Any, self: KvBlocks, seq: SequenceBlocks, num_tokens: int
) -> None:
    """They will be needed again."""


# --- fairness -----------------------------------------------------------------------------------


@_plant(Preemption, "preempt")
def charges_again_what_is_computed_again(
    preempt: Any, self: Preemption, victim: Request, step: Step
) -> None:
    """It takes the device's time, so it is service."""
    preempt(self, victim, step)
    victim.num_charged_tokens = 0


@_plant(Scheduler, "_charge_outputs")
def gives_outputs_away(charge_outputs: Any, self: Scheduler, *charged: Any) -> None:
    """Prompts are what takes long."""


@_plant(VirtualTokenCounters, "_floor")
def saves_credit_while_idle(floor: Any, self: VirtualTokenCounters[Any]) -> float:
    """Who asked for nothing has something to come."""
    return 0.0


# --- adapters -----------------------------------------------------------------------------------


@_plant(Record, "is_idle")
def evicts_leased_adapters(is_idle: Any, self: Record[Any]) -> bool:
    """Resident is resident."""
    return self.state is State.RESIDENT


@_plant(AdapterManager, "acquire")
def remembers_rows_without_generation(
    acquire: Any, self: AdapterManager[Any], key: AdapterKey, request_id: str
) -> Lease | None:
    """An adapter's row does not change while it is resident."""
    memo = self.__dict__.setdefault("_memo", {})
    lease: Lease | None = acquire(self, key, request_id)
    if lease is None:
        return None
    row, generation = memo.setdefault(key, (lease.row, lease.generation))
    return lease._replace(row=row, generation=generation)


@_plant(AdapterManager, "release")
def keeps_leases(release: Any, self: AdapterManager[Any], request_id: str) -> None:
    """The next request of the adapter will want it too."""
    if request_id in self._leases and not request_id.endswith("7"):
        release(self, request_id)


@_plant(AdapterManager, "_finish_retirements")
def never_ends_a_deletion(finish: Any, self: AdapterManager[Any]) -> bool:
    """It goes when its room is needed."""
    return False


@_plant(Retirements, "finish")
def confirms_deletions_before_the_bytes_are_zero(
    finish: Any, self: Retirements[Any], is_erasing: Any
) -> bool:
    """The job is on its way."""
    found: bool = finish(self, lambda key: False)
    return found


@_plant(Retirements, "leave_device")
def leaves_deleted_adapters_in_host_memory(
    leave: Any, self: Retirements[Any], key: AdapterKey
) -> None:
    """Nobody will ask for it, so it will be the first to be dropped."""
    self.open[key].is_off_device = True


@_plant(Erasures, "begin")
def frees_before_zeroing(
    begin: Any, self: Erasures[Any], key: AdapterKey, placement: Placement
) -> None:
    """Whoever comes next overwrites it."""
    self._arena.retire(placement)
    self._arena.free(placement)


@_plant(Erasures, "poll")
def takes_a_failed_erasure_for_done(poll: Any, self: Erasures[Any]) -> bool:
    """It has run."""
    finished = [erasure for erasure in self.running if erasure.job.done()]
    for erasure in finished:
        self.running.remove(erasure)
        self._arena.free(erasure.placement)
    return bool(finished)


@_plant(Moves, "poll")
def moves_without_a_new_row(poll: Any, self: Moves[Any]) -> bool:
    """The adapter is the same, so its row and generation are."""
    sources = [(move.record, move.record.placement) for move in self.running]
    has_moved: bool = poll(self)
    for record, source in sources:
        if source is not None and record.placement not in (None, source):
            extent = record.placement.extent
            record.placement = Placement(source.row, source.generation, extent)
    return has_moved


@_plant(ArenaPlanner, "is_leaving")
def leases_what_moves(leaving: Any, self: ArenaPlanner[Any], record: Record[Any]) -> bool:
    """It is on the device, whatever is planned for it."""
    return False


@_plant(EvictionPolicy, "may_go")
def evicts_pinned_adapters(may_go: Any, self: EvictionPolicy, occupant: Record[Any]) -> bool:
    """They come back by themselves."""
    with mock.patch.object(self._demand, "pins", ()):
        found: bool = may_go(self, occupant)
    return found


@_plant(EvictionPolicy, "cost")
def forgets_that_somebody_asked_for_a_stay(
    cost: Any, self: EvictionPolicy, occupant: Record[Any], newcomer: Newcomer
) -> Any:
    """What is wanted now comes before what was wanted then."""
    kept_until, occupant.kept_until = occupant.kept_until, 0.0
    found = cost(self, occupant, newcomer)
    occupant.kept_until = kept_until
    return found


@_plant(EvictionPolicy, "newcomer")
def lets_a_parade_evict_the_others(
    newcomer: Any, self: EvictionPolicy, *args: Any, **kwargs: Any
) -> Newcomer:
    """Least recently used is fair."""
    found: Newcomer = newcomer(self, *args, **kwargs)
    return found._replace(surplus=Surplus(frozenset(), False))


@_plant(AdapterManager, "_ask_for_pinned")
def forgets_pins_that_failed_once(ask: Any, self: AdapterManager[Any]) -> None:
    """Whoever pinned it will see that it is broken."""
    for key in self._demand.pins:
        if self._records.get(key) is None:
            self._ask(key, may_begin=True)


@_plant(Leases, "strays")
def reaps_a_lease_that_lives(strays: Any, self: Leases, live: Any) -> list[str]:
    """Whoever was admitted first must have ended by now."""
    found: list[str] = strays(self, sorted(live)[1:])
    return found


@_plant(Drains, "_end_hopeless")
def drains_without_a_deadline(end: Any, self: Drains, key: AdapterKey, drain: Any) -> None:
    """They end by themselves."""
    if drain.deadline > drain.begun_at:
        drain.deadline = float("inf")
    end(self, key, drain)


@_plant(Drains, "__contains__")
def takes_requests_while_it_drains(contains: Any, self: Drains, key: AdapterKey | None) -> bool:
    """The adapter is still there."""
    return False


@_plant(Drains, "note_end")
def keeps_the_cache_of_drained_adapters(
    note: Any, self: Drains, request: Request, *, is_deleted: bool
) -> None:
    """It was dropped when the deletion began."""
    kv, self._kv = self._kv, mock.Mock()
    note(self, request, is_deleted=is_deleted)
    self._kv = kv


# --- what requests are charged with ---------------------------------------------------------------


@_plant(StepCosts, "charge")
def charges_requests_whose_end_was_announced(
    charge: Any, self: StepCosts, sequences: Sequence[ScheduledSequence], seconds: float
) -> None:
    """They were in the step."""
    settled = [each.request for each in sequences if each.request.is_settled]
    for request in settled:
        request.is_settled = False
    charge(self, sequences, seconds)
    for request in settled:
        request.is_settled = True


@_plant(StepCosts, "charge")
def charges_each_request_with_the_whole_step(
    charge: Any, self: StepCosts, sequences: Sequence[ScheduledSequence], seconds: float
) -> None:
    """The step was needed for each of them."""
    for sequence in sequences:
        charge(self, [sequence], seconds)


@_plant(BlockPool, "_read")
def charges_each_holder_with_the_whole_block(
    read: Any, self: BlockPool, block_id: int, now: float
) -> float:
    """Each of them would need it without the others."""
    held_before, self._meters[block_id] = self._meters[block_id], 0.0
    seconds = read(self, block_id, now) * self.ref_count(block_id)
    self._meters[block_id] = held_before + seconds
    return self._meters[block_id]


@_plant(BlockPool, "share")
def lets_newcomers_pay_for_those_before(
    share: Any, self: BlockPool, block_ids: Iterator[int]
) -> float:
    """The meter says what the block has cost."""
    share(self, block_ids)
    return 0.0


@_plant(BlockPool, "allocate")
def goes_on_with_the_meter_of_the_last_content(
    allocate: Any, self: BlockPool, count: int
) -> list[int] | None:
    """A meter only ever grows."""
    meters = list(self._meters)
    block_ids: list[int] | None = allocate(self, count)
    for block_id in block_ids or ():
        self._meters[block_id] = meters[block_id]
    return block_ids


@_plant(KvBlocks, "release")
def forgets_what_was_held_until_a_release(
    release: Any, self: KvBlocks, seq: SequenceBlocks
) -> None:
    """It begins anew."""
    release(self, seq)
    seq.held_seconds = [0.0] * len(self.groups)


@_plant(AdapterManager, "claim_load")
def charges_every_user_with_the_load(claim: Any, self: AdapterManager[Any], key: AdapterKey) -> int:
    """It was loaded for all of them."""
    num_bytes: int = claim(self, key)
    record = self._records.resident(key)
    if record is not None:
        record.num_unclaimed_bytes = num_bytes
    return num_bytes


# --- the border between KV cache and arena --------------------------------------------------------


@_plant(Border, "_spare_bytes")
def gives_the_arena_what_the_cache_still_has(spare: Any, self: Border) -> int:
    """The blocks are free, so their memory is."""
    num_bytes: int = spare(self)
    return num_bytes + self._num_to_spare * self._block_bytes


@_plant(Border, "_is_given_back")
def gives_the_arena_what_waits_for_the_next_step(is_given_back: Any, self: Border) -> bool:
    """The followers have given it back."""
    return True


@_plant(GroupBlocks, "withdraw")
def keeps_the_memory_of_withdrawn_blocks(withdraw: Any, self: GroupBlocks, count: int) -> None:
    """Nobody uses them."""
    self.pool.withdraw(count)


@_plant(BlockPool, "withdraw")
def keeps_prefixes_of_withdrawn_blocks(withdraw: Any, self: BlockPool, count: int) -> list[int]:
    """They are given no new content."""
    on_reuse, self.on_reuse = self.on_reuse, None
    block_ids: list[int] = withdraw(self, count)
    self.on_reuse = on_reuse
    return block_ids


@_plant(GroupBlocks, "_move_tables")
def leaves_the_tables_of_moved_blocks(*_: Any) -> None:
    """The prefix cache knows where they are."""


@_plant(CachedBlocks, "move")
def leaves_the_keys_of_moved_blocks(*_: Any) -> None:
    """The tables know where they are."""


@_plant(GroupBlocks, "withdraw_last")
def leaves_the_bytes_of_the_last_blocks(
    withdraw: Any, self: GroupBlocks, count: int, live: Any
) -> None:
    """The arena overwrites them."""
    operations, self._operations = self._operations, OperationLog()
    withdraw(self, count, live)
    moves = [each for each in self._operations.take() if not isinstance(each, GiveBackBlocks)]
    self._operations = operations
    for move in moves:
        operations.add(move)


@_plant(BlockPool, "restore")
def restores_blocks_twice(restore: Any, self: BlockPool, count: int) -> None:
    """What is free again is no longer withdrawn; somebody will see to that."""
    withdrawn = list(self._withdrawn)
    restore(self, count)
    self._withdrawn[:] = withdrawn


@_plant(ArenaPlanner, "clear_withheld")
def takes_the_end_of_the_arena_away_at_once(clear: Any, self: ArenaPlanner[Any]) -> Any:
    """Its adapters will be gone soon."""
    for window in list(self._claims.withheld):
        self._claims.withheld.clear()
        self._set_capacity(window.offset)
    return []


@_plant(Claims, "withhold")
def drops_claims_at_the_end_only(withhold: Any, self: Claims, window: Extent) -> None:
    """The allocator looks at claims, and the end is nobody's."""
    for key in [key for key, other in self._windows.items() if window.overlaps(other)]:
        self.drop(key)
    self.withheld[:] = [Extent(window.offset, 0)]


@_plant(ArenaPlanner, "_evict_excess")
def evicts_pinned_adapters_for_the_cache(evict: Any, self: ArenaPlanner[Any], capacity: int) -> Any:
    """The cache needs the memory more."""
    idle = [record for record in self.occupants if record.is_idle]
    return self._evict(idle[:1], Departure.KV)


# --- the border in host memory --------------------------------------------------------------------


@_plant(GroupBlocks, "withdraw_slots")
def keeps_the_places_of_withdrawn_slots(withdraw: Any, self: GroupBlocks, count: int) -> None:
    """Nobody uses them."""
    self.host.withdraw(count)


@_plant(HostBorder, "_num_slots_beside")
def counts_half_a_slot_as_one(beside: Any, self: HostBorder, adapter_bytes: int) -> int:
    """Memory that is left over is wasted."""
    return -(-(self._bounds.total - adapter_bytes) // self._slot_bytes)


@_plant(HostBorder, "_num_to_spare")
def moves_slots_that_are_filled(to_spare: Any, self: HostBorder) -> int:
    """They are held, so they stay in use."""
    return self._group.host.num_free


@_plant(HostBorder, "_restore")
def restores_slots_that_adapters_have(restore: Any, self: HostBorder) -> None:
    """Adapters give up their end in time."""
    self._group.host.restore(self._group.host.num_withdrawn)


@_plant(HostBorder, "_hand_over")
def takes_what_adapters_have_at_once(hand_over: Any, self: HostBorder) -> None:
    """What lies there will be evicted soon."""
    hand_over(self)
    excess = self._num_slots - self._num_slots_beside(self._budget.adapter_bytes)
    if excess < 0:
        self._group.host.restore(min(-excess, self._group.host.num_withdrawn))
