"""The engine as the API process sees it: requests in, events out, whatever the process does.

The client owns every open request. When the engine process dies, those that had begun end with
`engine_restarted`; those that had not are given to the next process, once. A process that makes no
progress while requests are open is made to die.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import aclosing, suppress
from dataclasses import replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Protocol, assert_never

from ...adapters.errors import AdapterError, AdapterUnavailable
from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from ..config import EngineConfig
from ..errors import (
    BASE_ERRORS,
    AdapterDeleted,
    DeadlineExceeded,
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    InsufficientMemory,
    InvalidParameter,
    Overloaded,
    UnsupportedModel,
)
from ..heartbeat import SILENT_LOOKS, StallWatch
from ..messages import (
    Abort,
    AdapterEvicted,
    AdapterExplanation,
    AdapterFetched,
    AdapterFetchFailed,
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
    FinishReason,
    FromEngine,
    GenerationRequest,
    ListRequests,
    MapMemory,
    MemoryMap,
    Prefetch,
    PromptRead,
    RequestFinished,
    RequestList,
    RequestStarted,
    SetPinned,
    StepEvents,
    Submit,
    ToEngine,
    TokensGenerated,
)
from ..token_journal import TokenJournal
from .quarantine import Quarantine
from .request_stream import RequestEvent, RequestStream
from .supervisor import ENGINE_COMMAND, EngineProcess, RestartPolicy

MAX_SUBMISSIONS = 2
WARM_UP_SECONDS = 10.0
"""A shorter life may not have brought back the adapters that were resident before it."""
DEADLINE_SLACK_SECONDS = 0.5
"""The engine ends what passes its deadline; so much later the client does, should it be stuck."""
OVERLOAD_RETRY_SECONDS = 1.0
STALLED = "stalled"
"""The code of the failure where a process was ended because it made no progress."""
_START_ERRORS: Mapping[str, type[EngineError]] = {
    **{error.code: error for error in BASE_ERRORS},
    InsufficientMemory.code: InsufficientMemory,
}

_log = logging.getLogger(__name__)


class EngineState(StrEnum):
    """What the engine is doing, as far as whoever wants to use it is concerned."""

    STARTING = "starting"
    """For the first time."""
    READY = "ready"
    STALLED = "stalled"
    """It made no progress and is being ended."""
    RESTARTING = "restarting"
    """Its process died; the next one is on its way."""
    DOWN = "down"
    """It was stopped, could not start, or died too often: there is no next one."""


class FetchedBlock(Protocol):
    """An adapter's verified block on the local disk."""

    @property
    def path(self) -> Path: ...

    @property
    def tier(self) -> Tier: ...


class EngineClient:
    """Runs the engine process and talks to it. All methods belong to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_adapter_wanted: Callable[[AdapterKey], Awaitable[FetchedBlock]],
        on_adapter_read: Callable[[AdapterKey], None] = lambda key: None,
        command: Sequence[str] = ENGINE_COMMAND,
        restarts: RestartPolicy | None = None,
        journal: TokenJournal | None = None,
    ) -> None:
        """`on_adapter_wanted` brings a block to this machine, or raises; many run side by side.
        `on_adapter_read` is told when the engine needs that block's file no longer.

        The engine counts in `journal` the tokens of those requests that have a slot there.
        """
        self._config = config
        self._journal = journal
        self._on_adapter_wanted = on_adapter_wanted
        self._on_adapter_read = on_adapter_read
        self._command = command
        self._restarts = restarts or RestartPolicy()
        self._streams: dict[str, RequestStream] = {}
        """Every request that has not finished."""
        self._in_engine: dict[str, asyncio.Future[None]] = {}
        """Every request that the process may still work on, with what becomes done when not."""
        self._max_open_requests = config.max_queued + config.max_num_seqs
        self._quarantine = Quarantine(time.monotonic)
        self._residents: list[AdapterKey] = []
        """What the next process is asked to bring to the device, most recently used first."""
        self._pinned: list[AdapterKey] = []
        """What every process is told to keep; see `SetPinned`."""
        self._evictions: dict[AdapterKey, asyncio.Future[EvictionReceipt]] = {}
        self._explanations: dict[AdapterKey, asyncio.Future[AdapterExplanation]] = {}
        self._lists: dict[int, asyncio.Future[RequestList]] = {}
        self._maps: dict[int, asyncio.Future[MemoryMap]] = {}
        self._question_numbers = count()
        self._fetches: set[asyncio.Task[None]] = set()
        self._process: EngineProcess | None = None
        self._reported: ErrorInfo | None = None
        """What the process has said about its own end."""
        self.state = EngineState.STARTING
        self._ready_at: float | None = None
        self._spawned_at = 0.0
        self.start_seconds: float | None = None
        """How long the last start took that succeeded; None before the first."""
        self._supervision: asyncio.Task[None] | None = None
        self._is_stopping = asyncio.Event()
        self._has_first_outcome = asyncio.Event()
        self._info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        """The last snapshot of the running engine."""
        self.failure: ErrorInfo | None = None
        """Why the engine is down; None while it starts for the first time, and when it is ready."""
        self.num_restarts = 0

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.state is EngineState.READY

    @property
    def pid(self) -> int | None:
        """The engine process, where one runs."""
        return None if self._process is None else self._process.pid

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    @property
    def info(self) -> EngineInfo:
        """What the engine serves, also while it restarts. Raises EngineUnavailable before that."""
        if self._info is None:
            raise EngineUnavailable
        return self._info

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it is ready; from then on it is restarted if it dies.

        Raises UnsupportedModel, InsufficientMemory, InvalidParameter, or EngineUnavailable for all
        other reasons; `failure` has the engine's own code.
        """
        assert self._supervision is None, "an engine client is started once"
        self._supervision = asyncio.create_task(self._supervise())
        await self._has_first_outcome.wait()
        if not self.is_ready:
            failure = self.failure or ErrorInfo(EngineUnavailable.code, str(EngineUnavailable()))
            raise _start_error(failure)

    async def stop(self) -> None:
        """End the engine; what is still open ends with an error. Idempotent."""
        self._is_stopping.set()
        if self._process is not None:
            await self._process.stop()
        if self._supervision is not None:
            await asyncio.wait([self._supervision])

    async def _supervise(self) -> None:
        try:
            while (delay := await self._live()) is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._is_stopping.wait()
                        return
                self.num_restarts += 1
        finally:
            self.state = EngineState.DOWN
            self._has_first_outcome.set()
            for stream in list(self._streams.values()):
                self._end(stream, EngineUnavailable())

    async def _live(self) -> float | None:
        """One life of the process; the seconds until the next one may begin, None if none may."""
        self._spawned_at = time.monotonic()
        in_step: Set[str] = frozenset()
        try:
            self._process = process = await EngineProcess.spawn(
                self._config,
                command=self._command,
                journal=self._journal.path if self._journal else None,
            )
            if self._is_stopping.is_set():
                process.kill()
            watching = asyncio.create_task(self._watch_progress(process))
            try:
                status = await process.run(self._on_message)
            finally:
                watching.cancel()
            in_step = process.heartbeat.step_request_ids
            message = f"the engine process ended with status {status}"
        except OSError as exc:
            message = f"the engine process could not be started: {exc}"
        finally:
            self._process = None
        cause = self._reported or ErrorInfo(EngineUnavailable.code, message)
        return self._end_requests(cause, in_step=in_step)

    async def _watch_progress(self, process: EngineProcess) -> None:
        """End a process that has work and does not get on with it."""
        watch, seconds = StallWatch(), self._restarts.stall_seconds
        while True:
            await asyncio.sleep(seconds / SILENT_LOOKS)
            has_work = self.is_ready and bool(
                self._streams or self._evictions or self._explanations or self._lists or self._maps
            )
            if watch.look(process.heartbeat.count, has_work=has_work):
                break
        self.state = EngineState.STALLED
        message = f"the engine made no progress for {seconds:g} s while requests were open"
        self._reported = ErrorInfo(STALLED, message)
        _log.error("engine_stalled", extra={"pid": process.pid, "seconds": seconds})
        await process.dump_and_kill()

    def _end_requests(self, cause: ErrorInfo, *, in_step: Set[str]) -> float | None:
        """Settle what a dead process has left; the seconds until the next life, None if none."""
        was_ever_ready = self._info is not None
        lived_seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        self.state = EngineState.RESTARTING
        if not self._is_stopping.is_set():
            self._quarantine.note_crash(
                [self._streams[name].request for name in in_step & self._streams.keys()],
                is_alone=len(in_step) == 1,
            )
        self._ready_at = self._reported = self.stats = None
        for fetch in self._fetches:
            fetch.cancel()
        for key in list(self._evictions):
            self._on_evicted(key, EvictionReceipt())
        for explanation in self._explanations.values():
            explanation.cancel()
        for listing in self._lists.values():
            listing.cancel()
        for mapping in self._maps.values():
            mapping.cancel()
        self._explanations.clear()
        self._lists.clear()
        self._maps.clear()
        for request_id in list(self._in_engine):
            self._note_gone(request_id)
        for stream in list(self._streams.values()):
            if stream.is_started or stream.is_aborted or stream.num_submissions == MAX_SUBMISSIONS:
                objection = self._quarantine.objection(stream.request)
                self._end(stream, objection or EngineRestarted())
        if self._is_stopping.is_set():
            return None
        self.failure = cause
        if not was_ever_ready:
            return None  # `start` raises it
        _log.error("engine_died", extra={"code": cause.code, "error": cause.message})
        delay = self._restarts.next_delay(now=time.monotonic(), lived_seconds=lived_seconds)
        plan = "engine_stays_down" if delay is None else "engine_restart_planned"
        _log.warning(plan, extra={"delay_seconds": delay})
        return delay

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self, request: GenerationRequest, take: Callable[[RequestEvent], None] | None = None
    ) -> RequestStream:
        """Send a request to the engine; whoever submits must consume or close the stream.

        `take` gets each event at once, in the place of an iteration; it must not raise.
        Raises EngineUnavailable while the engine is down, InvalidParameter if a request with this
        id is still open, Overloaded if more are open than the engine takes, RequestQuarantined or
        AdapterQuarantined.
        """
        if not self.is_ready:
            raise EngineUnavailable
        if request.request_id in self._streams:
            raise InvalidParameter("request_id", "is in use")
        if len(self._streams) >= self._max_open_requests:
            raise Overloaded(retry_after_seconds=OVERLOAD_RETRY_SECONDS)
        if objection := self._quarantine.objection(request):
            raise objection
        stream = RequestStream(request, abort=self._abort, take=take)
        self._send_request(stream)  # what cannot be sent is not open
        self._streams[request.request_id] = stream
        if request.deadline_seconds is not None:
            stream.expiry = asyncio.get_running_loop().call_later(
                request.deadline_seconds + DEADLINE_SLACK_SECONDS, self._expire, stream
            )
        return stream

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestEvent, None]:
        """The request's events; leaving the iteration early aborts the request."""
        async with aclosing(self.submit(request)) as stream:
            async for event in stream:
                yield event

    async def until_gone(self, request_ids: Iterable[str]) -> None:
        """Return once no process works on these requests: nothing is counted for them any more."""
        waited_for = [self._in_engine[name] for name in request_ids if name in self._in_engine]
        if waited_for:
            await asyncio.wait(waited_for)

    def _note_gone(self, request_id: str) -> None:
        gone = self._in_engine.pop(request_id, None)
        if gone is not None and not gone.done():
            gone.set_result(None)

    def _send_request(self, stream: RequestStream) -> None:
        stream.num_submissions += 1
        request = stream.request
        if self._journal and request.journal_slot is not None:
            self._journal.reset(request.journal_slot)  # what a dead process did was for nobody
        if stream.expiry is not None and stream.num_submissions > 1:
            seconds = stream.expiry.when() - DEADLINE_SLACK_SECONDS
            left = max(0.0, seconds - asyncio.get_running_loop().time())
            request = replace(request, deadline_seconds=left)
        if num_lone_steps := self._quarantine.num_lone_steps(request):
            request = replace(request, num_lone_steps=num_lone_steps)
        self._send(Submit(request))
        if request.request_id not in self._in_engine:
            self._in_engine[request.request_id] = asyncio.get_running_loop().create_future()

    def _expire(self, stream: RequestStream) -> None:
        self._send(Abort(stream.request.request_id))
        self._end(stream, DeadlineExceeded())

    def _abort(self, stream: RequestStream) -> None:
        if self.is_ready:
            self._send(Abort(stream.request.request_id))
        else:
            self._end(stream, EngineRestarted())

    def _end(self, stream: RequestStream, error: EngineError) -> None:
        """End a request that no engine process has any more."""
        finished = RequestFinished(
            request_id=stream.request.request_id,
            reason=FinishReason.ERROR,
            num_prompt_tokens=len(stream.request.prompt_token_ids),
            num_generated_tokens=stream.num_generated_tokens,
            error=_as_info(error),
        )
        if stream.is_aborted:
            finished = replace(finished, reason=FinishReason.ABORTED, error=None)
        self._finish(finished)

    def _deliver(self, events: Sequence[RequestStarted | PromptRead | TokensGenerated]) -> None:
        """Give events to their requests; late ones of finished requests have nobody to go to."""
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.feed(event)

    def _finish(self, event: RequestFinished) -> None:
        stream = self._streams.pop(event.request_id, None)
        if stream is not None:
            self._quarantine.note_end(stream.request, event)
            stream.feed(event)

    # --- adapters ---------------------------------------------------------------------------------

    async def evict_adapter(
        self, key: AdapterKey, *, drain_seconds: float = 0.0
    ) -> EvictionReceipt:
        """Return once no tier of the engine holds the adapter.

        Its running requests have `drain_seconds` to end, all others end at once; a deletion that is
        under way keeps its own deadline. An engine that is down holds nothing.
        """
        self._pinned = [pinned for pinned in self._pinned if pinned != key]
        if self.state not in (EngineState.READY, EngineState.STALLED):
            self._forget_resident(key)
            streams = [s for s in self._streams.values() if s.request.adapter == key]
            for stream in streams:
                self._end(stream, AdapterDeleted())
            return EvictionReceipt(num_aborted=len(streams))
        if key not in self._evictions:
            self._evictions[key] = asyncio.get_running_loop().create_future()
            self._send(DeleteAdapter(key, drain_seconds))
        return await asyncio.shield(self._evictions[key])

    def set_pinned(self, keys: Sequence[AdapterKey]) -> None:
        """Keep exactly these adapters on the device, most wanted first; see `SetPinned`.

        An engine that restarts, or is down now, is told when it is ready.
        """
        self._pinned = list(dict.fromkeys(keys))
        if self.is_ready:
            self._send_pinned()

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        """Begin to bring an adapter to the device; see `Prefetch`. A down engine forgets it."""
        if self.is_ready and not self._quarantine.holds(key):
            self._send(Prefetch(key, stay_seconds))

    def note_stored(self, key: AdapterKey) -> None:
        """The store has the adapter's block anew: a load that failed may be tried again at once."""
        if self.is_ready:
            self._send(AdapterStored(key))

    async def explain_adapter(self, key: AdapterKey) -> AdapterExplanation:
        """Where an adapter is in the engine, since when, and what it waits for.

        Raises EngineUnavailable while there is no engine to ask.
        """
        if not self.is_ready:
            raise EngineUnavailable
        answer = self._explanations.get(key)
        if answer is None:
            answer = self._explanations[key] = asyncio.get_running_loop().create_future()
            self._send(ExplainAdapter(key))
        await asyncio.wait([answer])
        if answer.cancelled():
            raise EngineUnavailable
        return answer.result()

    async def list_requests(self, tenant_id: str | None = None, *, limit: int) -> RequestList:
        """Which sequences are in the engine now, and what they do; None: of all tenants.

        Raises EngineUnavailable while there is no engine to ask.
        """
        if not self.is_ready:
            raise EngineUnavailable
        number = next(self._question_numbers)
        answer: asyncio.Future[RequestList] = asyncio.get_running_loop().create_future()
        self._lists[number] = answer
        self._send(ListRequests(number, tenant_id, limit))
        await asyncio.wait([answer])
        if answer.cancelled():
            raise EngineUnavailable
        return answer.result()

    async def map_memory(self) -> MemoryMap:
        """Where adapters lie in the engine, and what KV blocks are used for.

        Raises EngineUnavailable while there is no engine to ask.
        """
        if not self.is_ready:
            raise EngineUnavailable
        number = next(self._question_numbers)
        answer: asyncio.Future[MemoryMap] = asyncio.get_running_loop().create_future()
        self._maps[number] = answer
        self._send(MapMemory(number))
        await asyncio.wait([answer])
        if answer.cancelled():
            raise EngineUnavailable
        return answer.result()

    def _on_evicted(self, key: AdapterKey, receipt: EvictionReceipt) -> None:
        self._forget_resident(key)
        eviction = self._evictions.pop(key, None)
        if eviction is not None:
            eviction.set_result(receipt)

    def _on_explained(self, explanation: AdapterExplanation) -> None:
        answer = self._explanations.pop(explanation.key, None)
        if answer is not None:
            answer.set_result(explanation)

    def _on_listed(self, listed: RequestList) -> None:
        answer = self._lists.pop(listed.number, None)
        if answer is not None:
            answer.set_result(listed)

    def _on_mapped(self, mapped: MemoryMap) -> None:
        answer = self._maps.pop(mapped.number, None)
        if answer is not None:
            answer.set_result(mapped)

    def _send_pinned(self) -> None:
        self._send(SetPinned([key for key in self._pinned if not self._quarantine.holds(key)]))

    def is_quarantined(self, key: AdapterKey) -> bool:
        """Requests for this adapter are refused for a while."""
        return self._quarantine.holds(key)

    def _note_residents(self, stats: EngineStats) -> None:
        keys = [entry.key for entry in stats.adapters if entry.tier is Tier.DEVICE]
        if self._ready_at is not None and time.monotonic() - self._ready_at < WARM_UP_SECONDS:
            keys = list(dict.fromkeys([*keys, *self._residents]))
        self._residents = keys

    def _forget_resident(self, key: AdapterKey) -> None:
        if key in self._residents:
            self._residents.remove(key)

    def _bring_residents_back(self) -> None:
        for key in self._residents:
            if not self._quarantine.holds(key):
                self._send(Prefetch(key))

    def _start_fetch(self, key: AdapterKey) -> None:
        fetch = asyncio.create_task(self._fetch(key))
        self._fetches.add(fetch)
        fetch.add_done_callback(self._fetches.discard)

    async def _fetch(self, key: AdapterKey) -> None:
        try:
            block = await self._on_adapter_wanted(key)
        except AdapterError as exc:
            answer: ToEngine = AdapterFetchFailed(key, _as_info(exc))
        except Exception:
            _log.exception("adapter_fetch_failed", extra={"adapter_digest": key.digest})
            answer = AdapterFetchFailed(key, _as_info(AdapterUnavailable()))
        else:
            answer = AdapterFetched(key, str(block.path), block.tier)
        self._send(answer)

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        if self._process is not None:
            self._process.send(message)

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case StepEvents(started, tokens, finished, prompts):
                for events in (started, prompts, tokens):
                    self._deliver(events)
                for end in finished:
                    self._finish(end)
                    self._note_gone(end.request_id)
            case AdapterWanted(key):
                self._start_fetch(key)
            case AdapterRead(key):
                self._on_adapter_read(key)
            case AdapterEvicted(key, receipt):
                self._on_evicted(key, receipt)
            case AdapterExplanation():
                self._on_explained(message)
            case RequestList():
                self._on_listed(message)
            case MemoryMap():
                self._on_mapped(message)
            case EngineStats():
                self.stats = message
                self._note_residents(message)
            case EngineReady(info):
                self._on_ready(info)
            case EngineFailed(error):
                self._reported = error
            case _:
                assert_never(message)

    def _on_ready(self, info: EngineInfo) -> None:
        if self._info is not None and self._info.base_id != info.base_id:
            error = UnsupportedModel("the base model's files have changed while it was served")
            self._reported = _as_info(error)
            raise error
        self._info = info
        self.state = EngineState.READY
        self._ready_at = time.monotonic()
        self.start_seconds = self._ready_at - self._spawned_at
        self.failure = None
        self._has_first_outcome.set()
        for stream in list(self._streams.values()):
            if objection := self._quarantine.objection(stream.request):
                self._end(stream, objection)
            else:
                self._send_request(stream)
        if self._pinned:
            self._send_pinned()
        self._bring_residents_back()


def _start_error(failure: ErrorInfo) -> EngineError:
    """Why the engine did not start, by the kinds that the operator can do something about."""
    if failure.code == InvalidParameter.code:
        param, _, message = failure.message.partition(": ")
        return InvalidParameter(param, message)
    return _START_ERRORS.get(failure.code, EngineUnavailable)(failure.message)


def _as_info(error: EngineError | AdapterError) -> ErrorInfo:
    return ErrorInfo(error.code, str(error), getattr(error, "retry_after_seconds", None))
