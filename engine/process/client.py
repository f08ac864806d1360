"""The engine's client in the API process: sends requests and receives events, across restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence, Set
from contextlib import aclosing
from itertools import count
from typing import assert_never

from ...adapters.identity import AdapterKey
from ..config import EngineConfig
from ..errors import AdapterDeleted, EngineUnavailable
from ..kv.tier_key import new_tier_key
from ..messages import (
    AdapterEvicted,
    AdapterExplanation,
    AdapterRead,
    AdapterStored,
    AdapterWanted,
    DeleteAdapter,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    ErrorInfo,
    EvictionReceipt,
    ExplainAdapter,
    ForgetOutputs,
    FromEngine,
    GenerationRequest,
    ListRequests,
    MapMemory,
    MemoryMap,
    Prefetch,
    PrefixPiece,
    RequestList,
    StepEvents,
)
from ..token_journal import SlotCounter
from .adapter_fetches import AdapterFetches, FetchedBlock
from .engine import Engine, EngineState
from .engine_observer import EngineObserver
from .engine_process import ENGINE_COMMAND
from .kept_adapters import KeptAdapters
from .known_adapters import KnownAdapters
from .open_requests import MAX_SUBMISSIONS, OpenRequests
from .prefix_erasures import PrefixErasures
from .quarantine import Quarantine
from .questions import Questions
from .request_stream import RequestEvent, RequestStream
from .supervisor import RestartPolicy, Supervisor


class EngineClient(Engine):
    """Runs the engine in a separate process. `Engine` documents the methods."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_adapter_wanted: Callable[[AdapterKey], Awaitable[FetchedBlock]],
        on_adapter_read: Callable[[AdapterKey], None] = lambda key: None,
        command: Sequence[str] = ENGINE_COMMAND,
        restarts: RestartPolicy | None = None,
        max_submissions: int = MAX_SUBMISSIONS,
        observer: EngineObserver | None = None,
        prefix_key: bytes | None = None,
    ) -> None:
        """`on_adapter_wanted` fetches a block to the local disk, or raises; calls run concurrently.
        `on_adapter_read` is called when the engine no longer needs that block's file.
        Both are called for adapter versions, never for a composition.
        `max_submissions`: the number of processes that may receive a request.
        `prefix_key`: of the prefixes on disk; None: they outlive processes, but not this client."""
        self._observer = observer or EngineObserver()
        self._supervisor = Supervisor(
            config,
            prefix_key=prefix_key or new_tier_key(),
            command=command,
            restarts=restarts,
            on_state=self._observer.note_state,
        )
        self._prefixes = PrefixErasures(config)
        send = self._supervisor.send
        self._quarantine = Quarantine(time.monotonic, self._observer.note_proven)
        self._requests = OpenRequests(
            self._supervisor,
            self._quarantine,
            max_requests=config.max_queued + config.max_num_seqs,
            max_submissions=max_submissions,
        )
        self._kept = KeptAdapters(self._supervisor, self._quarantine)
        self._fetches = AdapterFetches(on_adapter_wanted, send)
        self._on_adapter_read = on_adapter_read
        self._evictions: Questions[AdapterKey, EvictionReceipt] = Questions(send)
        self._explanations: Questions[AdapterKey, AdapterExplanation] = Questions(send)
        self._lists: Questions[int, RequestList] = Questions(send)
        self._maps: Questions[int, MemoryMap] = Questions(send)
        self._question_numbers = count()
        self._stats: EngineStats | None = None
        self._adapters = KnownAdapters()
        self._running: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def is_ready(self) -> bool:
        return self._supervisor.is_ready

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def start_seconds(self) -> float | None:
        return self._supervisor.start_seconds

    @property
    def info(self) -> EngineInfo:
        return self._supervisor.info

    @property
    def stats(self) -> EngineStats | None:
        return self._stats

    @property
    def pid(self) -> int | None:
        """The engine process, if one runs."""
        return self._supervisor.pid

    @property
    def failure(self) -> ErrorInfo | None:
        """Why the engine is down; None while it starts for the first time, and when it is ready."""
        return self._supervisor.failure

    async def start(self) -> None:
        assert self._running is None, "an engine client is started once"
        self._running = asyncio.create_task(self._run())
        await self._supervisor.until_first_outcome()

    async def stop(self) -> None:
        await self._supervisor.stop()
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        """Run one process after another until the supervisor starts no more."""
        try:
            while True:
                death = await self._supervisor.run_process(self._receive, has_work=self._has_work)
                await self._erase_prefixes()
                self._settle(death.step_request_ids)
                if not await self._supervisor.until_restart(death):
                    break
        finally:
            self._supervisor.note_down()
            self._requests.end_all(EngineUnavailable())

    def _has_work(self) -> bool:
        """Whether requests or questions are open."""
        questions = (self._evictions, self._explanations, self._lists, self._maps)
        return bool(self._requests) or any(each.open_keys for each in questions)

    async def _erase_prefixes(self) -> None:
        """Erase on disk what the dead process was to erase."""
        try:
            for key in self._evictions.open_keys:
                await self._prefixes.erase(key)
        except EngineUnavailable:
            self._evictions.give_up()

    def _settle(self, step_request_ids: Set[str]) -> None:
        """Answer everything that the dead process left open."""
        if not self._supervisor.is_stopping:
            self._observer.note_crash(self._requests.note_crash(step_request_ids))
        self._stats = None
        self._adapters = KnownAdapters()
        self._fetches.cancel()
        for key in self._evictions.open_keys:
            self._on_evicted(key, EvictionReceipt())
        for questions in (self._explanations, self._lists, self._maps):
            questions.give_up()
        self._requests.settle()

    # --- requests ---------------------------------------------------------------------------------

    @property
    def num_open_requests(self) -> int:
        return len(self._requests)

    def submit(
        self,
        request: GenerationRequest,
        take: Callable[[RequestEvent], None] | None = None,
        counter: SlotCounter | None = None,
    ) -> RequestStream:
        return self._requests.submit(request, take, counter)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestEvent, None]:
        """The request's events; leaving the iteration early aborts the request."""
        async with aclosing(self.submit(request)) as stream:
            async for event in stream:
                yield event

    def give_prefix(self, piece: PrefixPiece) -> None:
        """Pass a part of a prefix to the request that waits for it."""
        if self.is_ready:
            self._supervisor.send(piece)

    async def list_requests(self, tenant_id: str | None = None, *, limit: int) -> RequestList:
        self._check_ready()
        number = next(self._question_numbers)
        return await self._lists.ask(number, ListRequests(number, tenant_id, limit))

    # --- adapters ---------------------------------------------------------------------------------

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        if self.is_ready and not self._quarantine.holds(key):
            self._supervisor.send(Prefetch(key, stay_seconds))

    def set_pinned(self, keys: Sequence[AdapterKey], *, as_of: float = 0.0) -> None:
        self._kept.set_pinned(keys)

    def note_stored(self, key: AdapterKey) -> None:
        if self.is_ready:
            self._supervisor.send(AdapterStored(key))

    def forget_outputs(self, key: AdapterKey) -> None:
        if self.state in (EngineState.READY, EngineState.STALLED):
            self._supervisor.send(ForgetOutputs(key))

    async def evict_adapter(
        self, key: AdapterKey, *, drain_seconds: float = 0.0
    ) -> EvictionReceipt:
        self._kept.unpin(key)
        if self.state in (EngineState.READY, EngineState.STALLED):
            return await self._evictions.ask(key, DeleteAdapter(key, drain_seconds))
        self._kept.forget_resident(key)
        num_aborted = self._requests.end_adapter(key, AdapterDeleted())
        await self._prefixes.erase(key)
        return EvictionReceipt(num_aborted=num_aborted)

    async def explain_adapter(self, key: AdapterKey) -> AdapterExplanation:
        self._check_ready()
        return await self._explanations.ask(key, ExplainAdapter(key))

    def is_quarantined(self, key: AdapterKey) -> bool:
        return self._quarantine.holds(key)

    # --- memory -----------------------------------------------------------------------------------

    async def map_memory(self) -> MemoryMap:
        """The positions of adapters in the engine's memory, and the use of KV blocks.

        Raises EngineUnavailable while the engine is down.
        """
        self._check_ready()
        number = next(self._question_numbers)
        return await self._maps.ask(number, MapMemory(number))

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise EngineUnavailable

    # --- messages ---------------------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepEvents():
                self._requests.deliver(message)
            case AdapterWanted(key):
                self._fetches.start(key)
            case AdapterRead(key):
                for part in key.parts:
                    self._on_adapter_read(part)
            case AdapterEvicted(key, receipt):
                self._on_evicted(key, receipt)
            case AdapterExplanation():
                self._explanations.answer(message.load.key, message)
            case RequestList():
                self._lists.answer(message.number, message)
            case MemoryMap():
                self._maps.answer(message.number, message)
            case PrefixPiece():
                self._observer.note_prefix(message)
            case EngineStats():
                self._stats = self._adapters.complete(message)
                self._observer.note_stats(message)
                self._kept.note_residents(self._stats)
            case EngineReady(info):
                self._on_ready(info)
            case EngineFailed(error):
                self._supervisor.note_failure(error)
            case _:
                assert_never(message)

    def _on_evicted(self, key: AdapterKey, receipt: EvictionReceipt) -> None:
        self._kept.forget_resident(key)
        self._evictions.answer(key, receipt)

    def _on_ready(self, info: EngineInfo) -> None:
        self._supervisor.note_ready(info)
        self._requests.resubmit()
        self._kept.bring_back()
