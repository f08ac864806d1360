"""The engine as the API process sees it: requests in, events out, whatever the process does.

The client owns every open request. When the engine process dies, those that had begun end with
`engine_restarted`; those that had not are given to the next process, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol, assert_never

from ..adapters.errors import AdapterError, AdapterUnavailable
from ..adapters.identity import AdapterKey
from ..adapters.residency import Tier
from .config import EngineConfig
from .errors import (
    AdapterDeleted,
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    InsufficientMemory,
    InvalidParameter,
    UnsupportedModel,
)
from .messages import (
    Abort,
    AdapterEvicted,
    AdapterFetched,
    AdapterFetchFailed,
    AdapterWanted,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    ErrorInfo,
    EvictAdapter,
    FinishReason,
    FromEngine,
    GenerationRequest,
    RequestFinished,
    StepEvents,
    Submit,
    ToEngine,
)
from .request_stream import RequestEvent, RequestStream
from .supervisor import ENGINE_COMMAND, EngineProcess, RestartPolicy

MAX_SUBMISSIONS = 2
_START_ERRORS: Mapping[str, type[EngineError]] = {
    error.code: error for error in (UnsupportedModel, InsufficientMemory)
}
"""What the operator can do something about."""

_log = logging.getLogger(__name__)


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
        command: Sequence[str] = ENGINE_COMMAND,
        restarts: RestartPolicy | None = None,
    ) -> None:
        """`on_adapter_wanted` brings a block to this machine, or raises; many run side by side."""
        self._config = config
        self._on_adapter_wanted = on_adapter_wanted
        self._command = command
        self._restarts = restarts or RestartPolicy()
        self._streams: dict[str, RequestStream] = {}
        """Every request that has not finished."""
        self._evictions: dict[AdapterKey, asyncio.Future[None]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._process: EngineProcess | None = None
        self._reported: ErrorInfo | None = None
        """What the process has said about its own end."""
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
        return self._ready_at is not None

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

        Raises UnsupportedModel, InsufficientMemory, or EngineUnavailable for all other reasons;
        `failure` has the engine's own code.
        """
        assert self._supervision is None, "an engine client is started once"
        self._supervision = asyncio.create_task(self._supervise())
        await self._has_first_outcome.wait()
        if not self.is_ready:
            failure = self.failure or ErrorInfo(EngineUnavailable.code, str(EngineUnavailable()))
            raise _START_ERRORS.get(failure.code, EngineUnavailable)(failure.message)

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
            self._ready_at = None
            self._has_first_outcome.set()
            for stream in list(self._streams.values()):
                self._end(stream, EngineUnavailable())

    async def _live(self) -> float | None:
        """One life of the process; the seconds until the next one may begin, None if none may."""
        self._spawned_at = time.monotonic()
        try:
            self._process = await EngineProcess.spawn(self._config, command=self._command)
            if self._is_stopping.is_set():
                self._process.kill()
            status = await self._process.run(self._on_message)
            message = f"the engine process ended with status {status}"
        except OSError as exc:
            message = f"the engine process could not be started: {exc}"
        finally:
            self._process = None
        return self._bury(self._reported or ErrorInfo(EngineUnavailable.code, message))

    def _bury(self, cause: ErrorInfo) -> float | None:
        """Settle what a dead process has left; the seconds until the next life, None if none."""
        was_ever_ready = self._info is not None
        lived_seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        self._ready_at = self._reported = self.stats = None
        for fetch in self._fetches:
            fetch.cancel()
        for key in list(self._evictions):
            self._on_evicted(key)
        for stream in list(self._streams.values()):
            if stream.is_started or stream.is_aborted or stream.num_submissions == MAX_SUBMISSIONS:
                self._end(stream, EngineRestarted())
        if self._is_stopping.is_set():
            return None
        self.failure = cause
        _log.error("engine_died", extra={"code": cause.code, "error": cause.message})
        if not was_ever_ready:
            return None
        delay = self._restarts.next_delay(now=time.monotonic(), lived_seconds=lived_seconds)
        plan = "engine_stays_down" if delay is None else "engine_restart_planned"
        _log.warning(plan, extra={"delay_seconds": delay})
        return delay

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Send a request to the engine; whoever submits must consume or `aclose` the stream.

        Raises EngineUnavailable while the engine is down, InvalidParameter if a request with this
        id is still open.
        """
        if not self.is_ready:
            raise EngineUnavailable
        if request.request_id in self._streams:
            raise InvalidParameter("request_id", "is in use")
        stream = RequestStream(request, abort=self._abort)
        self._streams[request.request_id] = stream
        self._send_request(stream)
        return stream

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestEvent, None]:
        """The request's events; leaving the iteration early aborts the request."""
        async with aclosing(self.submit(request)) as stream:
            async for event in stream:
                yield event

    def _send_request(self, stream: RequestStream) -> None:
        stream.num_submissions += 1
        self._send(Submit(stream.request))

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
        self._deliver(finished)

    def _deliver(self, event: RequestEvent) -> None:
        """Give an event to its request; late events of finished ones have nobody to go to."""
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if isinstance(event, RequestFinished):
            del self._streams[event.request_id]
        stream.feed(event)

    # --- adapters ---------------------------------------------------------------------------------

    async def evict_adapter(self, key: AdapterKey) -> None:
        """Return once no tier of the engine holds the adapter; its requests end.

        An engine that is down holds nothing.
        """
        if not self.is_ready:
            for stream in list(self._streams.values()):
                if stream.request.adapter == key:
                    self._end(stream, AdapterDeleted())
            return
        if key not in self._evictions:
            self._evictions[key] = asyncio.get_running_loop().create_future()
            self._send(EvictAdapter(key))
        await asyncio.shield(self._evictions[key])

    def _on_evicted(self, key: AdapterKey) -> None:
        eviction = self._evictions.pop(key, None)
        if eviction is not None:
            eviction.set_result(None)

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
            case StepEvents(started, tokens, finished):
                events: Iterable[RequestEvent] = chain(started, tokens, finished)
                for event in events:
                    self._deliver(event)
            case AdapterWanted(key):
                self._start_fetch(key)
            case AdapterEvicted(key):
                self._on_evicted(key)
            case EngineStats():
                self.stats = message
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
        self._ready_at = time.monotonic()
        self.start_seconds = self._ready_at - self._spawned_at
        self.failure = None
        self._has_first_outcome.set()
        for stream in self._streams.values():
            self._send_request(stream)


def _as_info(error: EngineError | AdapterError) -> ErrorInfo:
    return ErrorInfo(error.code, str(error))
