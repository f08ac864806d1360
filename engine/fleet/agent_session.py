"""One API server's requests and questions to an agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

from ...adapters.errors import AdapterError
from ...adapters.identity import AdapterKey
from ..errors import EngineError, EngineUnavailable, InvalidParameter
from ..messages import (
    Abort,
    AdapterEvicted,
    AdapterFetchFailed,
    AdapterStored,
    BlockFound,
    DeleteAdapter,
    ErrorInfo,
    ExplainAdapter,
    FinishReason,
    ForgetOutputs,
    FromAgent,
    GenerationRequest,
    LeaseRenewed,
    ListRequests,
    MapMemory,
    Prefetch,
    PrefixPiece,
    RequestFinished,
    SetPinned,
    Submit,
    ToAgent,
)
from ..process.client import EngineClient
from ..process.request_stream import RequestEvent, RequestStream
from .link import AgentLink, Receiver
from .relayed_events import RelayedEvents
from .replica import Replica

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class AgentSession(Receiver[ToAgent]):
    """Lives as long as the link: its end aborts what the API server has open here."""

    def __init__(self, replica: Replica, link: AgentLink) -> None:
        self._replica = replica
        self._engine: EngineClient = replica.engine
        self._link = link
        self._events = RelayedEvents(link.send)
        self._streams: dict[str, RequestStream] = {}
        self._exports: set[str] = set()
        """The requests whose prefixes are not complete."""
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: FromAgent) -> bool:
        """False if the API server cannot be reached."""
        return self._link.send(message)

    @property
    def num_open(self) -> int:
        """The number of its open requests."""
        return len(self._streams)

    def take_prefix(self, piece: PrefixPiece) -> None:
        """Send a part of a prefix, if the API server has asked for it."""
        if piece.request_id in self._exports:
            self.send(piece)
            if piece.is_last:
                self._exports.remove(piece.request_id)

    def close(self) -> None:
        """End the link and all that it has open."""
        self._link.close()
        self._abandon()

    # --- Receiver ---------------------------------------------------------------------------------

    def take(self, message: ToAgent) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case PrefixPiece(request_id):
                if request_id in self._streams:
                    self._engine.give_prefix(message)
            case Abort(request_id):
                self._exports.discard(request_id)
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.abort()
            case DeleteAdapter(key, drain_seconds):
                self._start(self._delete(key, drain_seconds))
            case SetPinned():
                self._replica.set_pinned(message)
            case Prefetch(key, stay_seconds):
                self._engine.prefetch(key, stay_seconds)
            case AdapterStored(key):
                self._engine.note_stored(key)
            case ForgetOutputs(key):
                self._engine.forget_outputs(key)
            case ExplainAdapter(key):
                self._start(self._answer(self._engine.explain_adapter(key)))
            case ListRequests():
                self._start(self._list_requests(message))
            case MapMemory(number):
                self._start(self._map_memory(number))
            case BlockFound() | AdapterFetchFailed():
                self._replica.blocks.answer(message)
            case LeaseRenewed(number, seconds):
                self._replica.renew_lease(number, seconds)
            case _:
                assert_never(message)

    def end(self, error: EngineError) -> None:
        _log.warning("api_server_lost", extra={"code": error.code, "reason": str(error)})
        self._abandon()
        self._replica.note_end(self)

    # --- requests ---------------------------------------------------------------------------------

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self._replica.check_accepts()
            take = partial(self._relay, request.request_id)
            stream = self._engine.submit(request, take)
        except EngineError as exc:
            self._events.add(_refusal(request, _as_refusal(exc)))
        else:
            self._streams[request.request_id] = stream
            if request.exports_prefix:
                self._exports.add(request.request_id)

    def _relay(self, request_id: str, event: RequestEvent) -> None:
        if isinstance(event, RequestFinished):
            self._streams.pop(request_id, None)
        self._events.add(event)

    def _abandon(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()
        self._streams.clear()
        self._exports.clear()
        for task in self._tasks:
            task.cancel()

    # --- questions --------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, answer: Awaitable[FromAgent]) -> None:
        """Send the answer. A question without an answer ends with the state that prevents it."""
        try:
            self.send(await answer)
        except EngineError as exc:
            _log.info("question_not_answered", extra={"code": exc.code})

    async def _list_requests(self, asked: ListRequests) -> None:
        async def find() -> FromAgent:
            found = await self._engine.list_requests(asked.tenant_id, limit=asked.limit)
            return replace(found, number=asked.number)

        await self._answer(find())

    async def _map_memory(self, number: int) -> None:
        async def find() -> FromAgent:
            return replace(await self._engine.map_memory(), number=number)

        await self._answer(find())

    async def _delete(self, key: AdapterKey, drain_seconds: float) -> None:
        """Remove the adapter from all tiers of this machine; the answer comes when it is gone."""
        receipt = await self._engine.evict_adapter(key, drain_seconds=drain_seconds)
        await _until_done(partial(asyncio.to_thread, self._replica.fetcher.forget, key))
        self.send(AdapterEvicted(key, receipt))


async def _until_done(work: Callable[[], Awaitable[None]]) -> None:
    """Repeat it until it succeeds: the fetcher's process may be restarting."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await work()
        except AdapterError as exc:
            _log.warning("deletion_delayed", extra={"error": str(exc)})
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _as_refusal(error: EngineError) -> EngineError:
    """A request whose id is in use comes from a link that has ended a moment ago, and what that
    link left is being aborted: another replica may take it."""
    if isinstance(error, InvalidParameter) and error.param == "request_id":
        return EngineUnavailable()
    return error


def _refusal(request: GenerationRequest, error: EngineError) -> RequestFinished:
    return RequestFinished(
        request_id=request.request_id,
        reason=FinishReason.ERROR,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=0,
        error=ErrorInfo(error.code, str(error), error.retry_after_seconds),
    )
