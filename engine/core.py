"""The engine's heart: one loop of schedule, run, process. Single-threaded.

Everything that can go wrong with one request ends that request and no other.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, assert_never

import torch

from ..adapters.arena import Arena
from ..adapters.host_cache import HostCache
from ..adapters.loaders import LoaderThreads, Pace
from ..adapters.manager import AdapterManager
from .checkpoint.files import locate_base
from .config import EngineConfig
from .errors import AdapterDeleted, EngineError, InvalidParameter
from .execution.decode_graphs import open_decode_graphs, serves_graphs
from .execution.execution import Drawn, Execution, StepRows
from .execution.grammars import open_grammars
from .execution.profiling import plan_engine
from .execution.prompt_reading import read_prompt
from .execution.runner import ModelRunner, StepOutput
from .heartbeat import Heartbeat
from .kv.blocks import KvBlocks
from .kv.cache import KvCache, kv_bytes_per_block
from .kv.prefix_cache import CacheNamespace
from .memory.device_peak import measure_peak
from .memory.model_cost import model_cost
from .memory.plan import MemoryPlan
from .memory.utilization import KvReads, Utilization
from .messages import (
    Abort,
    AdapterEvicted,
    AdapterFetched,
    AdapterFetchFailed,
    AdapterRead,
    AdapterResidency,
    AdapterStored,
    AdapterWanted,
    DeleteAdapter,
    EngineStats,
    ErrorInfo,
    ExplainAdapter,
    FinishReason,
    FromEngine,
    GenerationRequest,
    ListRequests,
    MapMemory,
    Prefetch,
    RequestFinished,
    RequestStarted,
    SetPinned,
    StepEvents,
    Submit,
    ToEngine,
    TokensGenerated,
)
from .model.base_model import BaseModel, load_base_model
from .model.block_preparation import BlockPreparation
from .next_tokens import draw_next_tokens
from .reports.adapters import HitsByTier, explain, tier_stats
from .reports.info import describe_engine
from .reports.memory import map_memory
from .reports.requests import list_requests
from .request import Request
from .sampling_params import MAX_LOGPROBS
from .scheduling.batch import ScheduledBatch, ScheduledSequence
from .scheduling.drains import Drains
from .scheduling.lone_steps import Part, parts_of
from .scheduling.scheduler import Scheduler, SchedulerLimits
from .scheduling.step_costs import StepCosts
from .scheduling.tenant_service import TenantService
from .speculation.draft_loading import load_draft_model
from .speculation.draft_model import open_draft_model
from .speculation.medusa import heads_bytes, open_medusas
from .speculation.speculation import open_speculation
from .token_journal import JournalCounters

logger = logging.getLogger(__name__)

STATS_INTERVAL_SECONDS = 0.5
REAP_INTERVAL_SECONDS = 5.0


class EngineCore:
    """One base model and everything that runs on it.

    `handle` takes messages, `step` does one iteration and returns messages. The caller owns the
    thread and the transport.
    """

    def __init__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load the model and size the pools. Raises EngineError if that is impossible."""
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._config = config
        self._clock = clock
        base = load_base_model(config)
        draft = load_draft_model(config, base)
        medusas = open_medusas(config, base)
        plan = plan_engine(config, base, draft, head_bytes=heads_bytes(medusas))
        self._grammars = open_grammars(
            locate_base(config.model), vocab_size=base.vocab_size, eos_token_ids=base.eos_token_ids
        )
        self._base = base
        self._models = [base] if draft is None else [base, draft]
        self._outbox: list[FromEngine] = []
        self._heartbeat: Heartbeat | None = None
        self._counters: JournalCounters | None = None
        self._events = StepEvents()
        self._num_steps = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_prefix_query_tokens = self._num_step_sequences = 0
        self._tenant_service = TenantService()
        self._next_stats_time = 0.0
        self._next_reap_time = clock() + REAP_INTERVAL_SECONDS
        self._hits = HitsByTier()

        peak = measure_peak(
            base.device,
            base.dtype,
            bits=config.quantization.bits,
            threads=torch.get_num_threads(),
        )
        self._utilization = Utilization(peak)
        self._cost = model_cost(base, tuple(_kv_reads(base, plan)))
        self._pace = Pace(config.loader_duty)
        arena = Arena(
            base.layout,
            plan.arena_bytes,
            base.dtype,
            base.device,
            pace=self._pace,
            copy_bytes=plan.window_bytes,
        )
        base.attach_arena(arena)
        host = HostCache(
            base.layout,
            config.host_cache_bytes,
            base.dtype,
            page_locked=base.device.type == "cuda",
            pace=self._pace,
            prepare=BlockPreparation(base.layout, base.extended),
        )
        self._loaders = LoaderThreads(config.num_loader_threads)
        self._arena = arena
        self._manager = AdapterManager(
            arena=arena,
            host=host,
            loaders=self._loaders,
            clock=clock,
            num_soon=config.max_num_seqs,
        )
        cache = KvCache(
            plan.kv_groups,
            base.kv_shapes,
            block_size=config.kv_block_size,
            kv_format=base.kv_format,
            device=base.device,
            num_swap_slots=plan.num_swap_slots,
            has_spare_blocks=serves_graphs(config, base),
        )
        self._kv = KvBlocks(
            plan.kv_groups,
            config.kv_block_size,
            prefix_secret=secrets.token_bytes(32) if config.prefix_caching else None,
            num_swap_slots=plan.num_swap_slots,
        )
        self._num_kv_groups = len(plan.kv_groups)
        graphs = open_decode_graphs(config, base, cache, arena, max_model_len=plan.max_model_len)
        self._runner = ModelRunner(base, cache, arena, graphs)
        costs = StepCosts(max_graph_rows=graphs.max_rows if graphs else None)
        drafting = open_draft_model(config, base, draft, plan.num_draft_blocks)
        self._speculation = open_speculation(
            config,
            base=base,
            runner=self._runner,
            costs=costs,
            clock=clock,
            loaded=[*medusas, *([drafting] if drafting else [])],
        )
        plan.lines.extend(self._runner.capture())
        self.info = describe_engine(config, base, plan, serves_grammars=self._grammars.is_served)
        limits = _limits(config, base, plan)
        self._kv_block_bytes = limits.kv_block_bytes
        self._scheduler = Scheduler(
            limits,
            kv=self._kv,
            manager=self._manager,
            costs=costs,
            clock=clock,
            drafts=self._speculation,
        )
        self._execution = Execution(
            runner=self._runner,
            scheduler=self._scheduler,
            speculation=self._speculation,
            read=self._read_prompt,
            draw=self._draw,
            eos_token_ids=base.eos_token_ids,
            emit=self._emit,
            finish=self._finish,
        )
        self._drains = Drains(
            scheduler=self._scheduler,
            manager=self._manager,
            kv=self._kv,
            clock=clock,
            abort=lambda request, error: self._finish(request, FinishReason.ERROR, error),
        )

    @property
    def has_work(self) -> bool:
        """False: nothing will happen before the next message."""
        pending = self._scheduler.has_requests or self._manager.has_pending_work
        return pending or bool(self._outbox) or self._has_events

    @property
    def awaits_message(self) -> bool:
        """After a step: only a message, such as a fetched adapter, can make the next one useful."""
        idle = not self._scheduler.num_running and not self._manager.has_pending_work
        idle = idle and not self._grammars.has_pending
        return idle and not self._outbox and not self._has_events

    def report_progress_to(self, heartbeat: Heartbeat) -> None:
        """Name each step's requests before it runs, and beat between its layers."""
        self._heartbeat = heartbeat
        for model in self._models:
            model.call_between_layers(heartbeat.beat)

    def count_tokens_in(self, counters: JournalCounters) -> None:
        """Keep the journal's counts of each request that has a slot there."""
        self._counters = counters

    def handle(self, message: ToEngine) -> None:
        """Take one message; never raises for what a message says."""
        match message:
            case Submit(submitted):
                self._submit(submitted)
            case Abort(request_id):
                if request := self._scheduler.get(request_id):
                    self._finish(request, FinishReason.ABORTED)
            case AdapterFetched(key, path, tier):
                self._manager.fetched(key, path, tier)
            case AdapterFetchFailed(key, error):
                self._manager.fetch_failed(key, error.code, error.message)
            case DeleteAdapter(key, drain_seconds):
                self._drains.begin(key, drain_seconds)
            case SetPinned(keys):
                self._manager.set_pinned(keys)
            case Prefetch(key, stay_seconds):
                self._manager.prefetch(key, stay_seconds)
            case AdapterStored(key):
                self._manager.forgive(key)
            case ExplainAdapter(key):
                speculation = self._speculation.explain(key)
                self._outbox.append(explain(self._manager, key, speculation))
            case ListRequests():
                self._outbox.append(list_requests(message, self._scheduler, self._clock()))
            case MapMemory(number):
                mapped = map_memory(
                    number,
                    self._manager,
                    self._scheduler,
                    self._kv,
                    kv_block_bytes=self._kv_block_bytes,
                )
                self._outbox.append(mapped)
            case _:
                assert_never(message)

    def step(self) -> list[FromEngine]:
        """One iteration: take up finished loads, schedule, run, process."""
        self._manager.poll()
        self._reap_if_due()
        for request, error in self._grammars.poll():
            if error is None:
                self._scheduler.release(request)
            else:
                self._finish(request, FinishReason.ERROR, error)
        self._outbox += [AdapterEvicted(*answer) for answer in self._drains.poll()]
        batch, started, failed = self._scheduler.schedule()
        self._events.started.extend(started)
        for request, error in failed:
            self._announce_end(request, FinishReason.ERROR, error)
        self._count_started(started)
        self._pace.is_busy = batch is not None
        if batch:
            self._run_measured(batch)
            self._pace.is_busy = self._scheduler.num_running > 0
        return self._take_messages()

    def close(self) -> None:
        """Stop the loader threads."""
        self._pace.is_busy = False
        self._loaders.close()
        self._grammars.close()

    def _count_started(self, started: Sequence[RequestStarted]) -> None:
        for event in started:
            self._num_cached_tokens += event.num_cached_tokens
            self._hits.add(event)
            if request := self._scheduler.get(event.request_id):
                num_prompt_tokens = request.num_prompt_tokens
                slot = request.submitted.journal_slot
                if self._counters and slot is not None:
                    self._counters.start(
                        slot,
                        num_prompt_tokens=num_prompt_tokens,
                        num_cached_tokens=event.num_cached_tokens,
                    )
                self._num_prompt_tokens += num_prompt_tokens
                if self._config.prefix_caching:
                    self._num_prefix_query_tokens += num_prompt_tokens
                self._tenant_service.add(
                    request.submitted.tenant_id, num_prompt_tokens - event.num_cached_tokens
                )

    # --- requests ---------------------------------------------------------------------------------

    def _submit(self, submitted: GenerationRequest) -> None:
        if self._scheduler.get(submitted.request_id):
            # An end event under this id would end the first request's stream.
            logger.error("request id %s is in use", submitted.request_id)
            return
        adapter = submitted.adapter
        seed = submitted.sampling.seed
        request = Request(
            submitted=submitted,
            namespace=CacheNamespace(
                submitted.tenant_id, self.info.runtime_id, adapter, submitted.cache_namespace
            ),
            seed=secrets.randbits(63) if seed is None else seed,
            arrival_time=self._clock(),
            adapter_tier=self._manager.tier(adapter) if adapter else None,
        )
        try:
            _check_token_ids(submitted, self.info.vocab_size)
            _check_reading(submitted)
            self._speculation.check(submitted.speculation)
            if adapter in self._drains:
                raise AdapterDeleted
            has_grammar = submitted.sampling.grammar is not None
            self._scheduler.add(request, is_held=has_grammar)
            if has_grammar:
                self._grammars.prepare(request)
        except EngineError as exc:
            self._finish(request, FinishReason.ERROR, exc)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        error: EngineError | None = None,
        *,
        stop_token_id: int | None = None,
    ) -> None:
        self._scheduler.finish(request)
        self._announce_end(request, reason, error, stop_token_id=stop_token_id)

    def _announce_end(
        self,
        request: Request,
        reason: FinishReason,
        error: EngineError | None = None,
        *,
        stop_token_id: int | None = None,
    ) -> None:
        self._events.finished.append(
            RequestFinished(
                request_id=request.request_id,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_generated_tokens=request.num_generated_tokens,
                error=_as_info(error) if error else None,
                stop_token_id=stop_token_id,
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
            )
        )
        self._speculation.forget(request.request_id)
        self._grammars.forget(request, error)
        self._drains.note_end(request, is_deleted=isinstance(error, AdapterDeleted))

    # --- adapters ---------------------------------------------------------------------------------

    def _reap_if_due(self) -> None:
        """Leases belong to requests that hold them: release any other."""
        if self._clock() < self._next_reap_time:
            return
        self._next_reap_time = self._clock() + REAP_INTERVAL_SECONDS
        self._manager.reap(
            request.request_id for request in self._scheduler.requests() if request.lease
        )

    # --- one step ---------------------------------------------------------------------------------

    def _run_measured(self, batch: ScheduledBatch) -> None:
        """Run the step; take down what it had to do and how long it took."""
        start = self._clock()
        self._runner.prepare_blocks(batch)
        prepared = self._clock()
        sequences = self._execution.current(batch.sequences)
        if not sequences:
            return
        ran = []
        end = start
        for part in parts_of(sequences):
            ran.append(self._run_part(part, since=end))
            end = self._clock()
        self._num_steps += 1
        self._num_step_sequences += len(sequences)
        if len(ran) > 1 or not ran[0].is_one_step:
            return  # what it took says nothing of a step's cost
        computed = batch.running(ran[0].sequences)
        if not computed.shape.num_prefill_tokens:
            self._speculation.observe_step(end - prepared)
        self._scheduler.observe(
            computed,
            end - start - ran[0].draft_seconds,
            swap_seconds=prepared - start,
        )

    def _run_part(self, sequences: Part, *, since: float) -> _Ran:
        """Run what shares a forward; the time since then is counted for it."""
        start = self._clock()
        if self._heartbeat:
            self._heartbeat.begin_step(sequence.request.request_id for sequence in sequences)
        sequences = self._speculation.draft(sequences)
        drafted = self._clock()
        leases = (sequence.request.lease for sequence in sequences)
        rows = {lease.row for lease in leases if lease is not None}
        adapter_bytes = sum(map(self._arena.row_bytes, rows))
        work = self._cost.work(sequences, adapter_bytes=adapter_bytes)
        is_one_step = self._execution.run(sequences)
        self._utilization.add(work, self._clock() - since)
        return _Ran(sequences, is_one_step, drafted - start)

    def _read_prompt(self, sequence: ScheduledSequence, output: StepOutput, rows: StepRows) -> None:
        if (read := read_prompt(sequence, output, rows)) is not None:
            self._events.prompts.append(read)

    def _draw(
        self, requests: Sequence[Request], output: StepOutput, rows: Sequence[int]
    ) -> list[Drawn | EngineError]:
        logits = output.logits
        if len(rows) < len(logits):  # a copy, and a wait for the device
            logits = logits[rows]
        return draw_next_tokens(
            requests, logits, self._speculation.acceptor, self._grammars.restrict
        )

    def _emit(self, request: Request, generated: TokensGenerated) -> None:
        num_tokens = len(generated.token_ids)
        slot = request.submitted.journal_slot
        if self._counters and slot is not None:  # first: nobody sees a token that is not counted
            self._counters.generate(slot, request.num_generated_tokens + num_tokens)
        self._events.tokens.append(generated)
        self._num_generated_tokens += num_tokens
        self._tenant_service.add(request.submitted.tenant_id, num_tokens)

    # --- messages ---------------------------------------------------------------------------------

    def _take_messages(self) -> list[FromEngine]:
        fetches = self._manager.fetches
        messages: list[FromEngine] = [AdapterRead(key) for key in fetches.take_read()]
        messages += [AdapterWanted(key) for key in fetches.take_wanted()]
        messages += self._outbox
        self._outbox = []
        if self._has_events:
            messages.append(self._events)
            self._events = StepEvents()
        if self._clock() >= self._next_stats_time:
            self._next_stats_time = self._clock() + STATS_INTERVAL_SECONDS
            messages.append(self.stats())
        return messages

    @property
    def _has_events(self) -> bool:
        events = self._events
        return bool(events.started or events.prompts or events.tokens or events.finished)

    def stats(self) -> EngineStats:
        """Where the engine stands now."""
        return EngineStats(
            num_steps=self._num_steps,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_kv_blocks=sum(map(self._kv.num_free, range(self._num_kv_groups))),
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_adapter_loads=self._manager.num_loads,
            num_adapter_evictions=self._manager.num_evictions,
            adapters=[AdapterResidency(*entry) for entry in self._manager.reports.snapshot()],
            kv_usage=max(
                1 - self._kv.num_free(group) / self._kv.num_usable(group)
                for group in range(self._num_kv_groups)
            ),
            num_swaps=self._scheduler.num_swaps,
            num_swapped=self._scheduler.num_swapped,
            num_prefix_query_tokens=self._num_prefix_query_tokens,
            num_step_sequences=self._num_step_sequences,
            num_graph_steps=self._runner.num_graph_steps,
            num_eager_decodes=self._runner.num_eager_decodes,
            utilization=self._utilization.snapshot(),
            tenant_service=self._tenant_service.snapshot(),
            adapter_tiers=tier_stats(self._manager, self._hits),
            speculation=self._speculation.snapshot(),
            speculation_totals=self._speculation.totals(),
        )


class _Ran(NamedTuple):
    """What came of one part of a step."""

    sequences: Part
    """With what was drafted."""
    is_one_step: bool
    """Whether one forward was enough."""
    draft_seconds: float


def _limits(config: EngineConfig, base: BaseModel, plan: MemoryPlan) -> SchedulerLimits:
    target = config.target_itl_ms
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=config.kv_block_size,
        target_itl_seconds=None if target is None else target / 1000,
        max_queued=config.max_queued,
        max_queued_per_tenant=config.max_queued_per_tenant,
        tenant_cap=config.tenant_cap,
        kv_block_bytes=tuple(
            kv_bytes_per_block(
                group, base.kv_shapes, block_size=config.kv_block_size, kv_format=base.kv_format
            )
            for group in plan.kv_groups
        ),
    )


def _kv_reads(base: BaseModel, plan: MemoryPlan) -> Iterator[KvReads]:
    """What a query of each group of layers reads of the cache."""
    for group in plan.kv_groups:
        yield KvReads(
            kv_bytes_per_block(group, base.kv_shapes, block_size=1, kv_format=base.kv_format),
            group.window,
            group.sinks,
        )


def _as_info(error: EngineError) -> ErrorInfo:
    return ErrorInfo(error.code, str(error), error.retry_after_seconds, error.is_retryable)


def _check_reading(request: GenerationRequest) -> None:
    num_logprobs, pooling = request.num_prompt_logprobs, request.pooling
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        raise InvalidParameter("prompt_logprobs", f"must be from 0 to {MAX_LOGPROBS}")
    if pooling is not None and (num_logprobs is not None or request.sampling.max_tokens):
        raise InvalidParameter("pooling", "goes with neither output nor log-probabilities")


def _check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    if not request.prompt_token_ids:
        raise InvalidParameter("prompt", "is empty")
    if not all(0 <= token < vocab_size for token in request.prompt_token_ids):
        raise InvalidParameter("prompt", f"has token ids outside [0, {vocab_size})")
    if not all(0 <= token < vocab_size for token in request.sampling.logit_bias):
        raise InvalidParameter("logit_bias", f"has token ids outside [0, {vocab_size})")
