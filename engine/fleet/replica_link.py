"""An API server's connection to one replica, made again whenever it ends."""

from __future__ import annotations

import asyncio
import logging
import ssl
from itertools import count
from typing import Protocol, assert_never

from ...adapters.identity import AdapterKey
from ..errors import EngineError, EngineUnavailable, ReplicaReplaced
from ..messages import (
    AdapterEvicted,
    AdapterExplanation,
    AdaptersProven,
    AdapterWanted,
    DeleteAdapter,
    EngineCrashed,
    EngineInfo,
    EngineReady,
    EngineStats,
    ErrorInfo,
    EvictionReceipt,
    ExplainAdapter,
    FromAgent,
    Hello,
    LeaseAsked,
    LeaseRenewed,
    ListRequests,
    MapMemory,
    MemoryMap,
    PrefixPiece,
    ReplicaChanged,
    ReplicaRole,
    ReplicaState,
    RequestList,
    StepEvents,
    ToAgent,
)
from ..process.known_adapters import KnownAdapters
from ..process.questions import Questions
from .link import ApiLink, Receiver, connect
from .load_pace import LoadPace
from .member import Member
from .replica_figures import QueueTimes

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 2.0
CANCEL_SECONDS = 0.1

_log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """Is told what happens on the links of an API server."""

    def check_base(self, base_id: str, runtime_id: str) -> tuple[str, str]:
        """The base and the runtime that the fleet serves, for an agent that serves these."""

    def note_state(self, link: ReplicaLink) -> None:
        """The replica's state has changed."""

    def note_stats(self, link: ReplicaLink) -> None:
        """The replica has sent statistics."""

    def note_crash(self, crash: EngineCrashed) -> None:
        """The replica's engine has ended in a step."""

    def note_proven(self, key: AdapterKey) -> None:
        """The adapter has answered often enough on the replica."""

    def relay(self, link: ReplicaLink, piece: PrefixPiece) -> None:
        """A part of a prefix that the replica has computed for another one."""

    def note_lost(self, link: ReplicaLink) -> None:
        """The connection has ended, and with it all that was open there."""

    def deliver(self, link: ReplicaLink, events: StepEvents) -> None:
        """Events of requests."""

    def locate(self, link: ReplicaLink, key: AdapterKey) -> None:
        """Answer the agent with BlockFound or AdapterFetchFailed."""


class ReplicaLink(Receiver[FromAgent]):
    """Connects until it is closed. All methods belong to one event loop."""

    def __init__(self, member: Member, *, context: ssl.SSLContext, owner: LinkOwner) -> None:
        self.member = member
        self.state = ReplicaState.REFUSING
        self.role = ReplicaRole.BOTH
        self.failure: ErrorInfo | None = None
        """Why there is no connection; None while there is one, and before the first attempt."""
        self.incarnation: str | None = None
        """Of the connected agent; None: none is."""
        self.info: EngineInfo | None = None
        """Of the last connected agent."""
        self.stats: EngineStats | None = None
        self.num_restarts = 0
        """Of the engine, in the agent's present life."""
        self.num_times_ready = 0
        self.queue_times = QueueTimes()
        self.load_pace = LoadPace()
        self._last_incarnation: str | None = None
        self._num_crashes = 0
        """Of the last connected agent: those that this server knows."""
        self.lease_asked: int | None = None
        """The number of the agent's last unanswered question for its lease."""
        self._context = context
        self._owner = owner
        self._link: ApiLink | None = None
        self._ended = asyncio.Event()
        self._adapters = KnownAdapters()
        self._evictions: Questions[AdapterKey, EvictionReceipt] = Questions(self.send)
        self._explanations: Questions[AdapterKey, AdapterExplanation] = Questions(self.send)
        self._lists: Questions[int, RequestList] = Questions(self.send)
        self._maps: Questions[int, MemoryMap] = Questions(self.send)
        self._question_numbers = count()
        self._changes: set[asyncio.Future[None]] = set()
        self._running = asyncio.create_task(self._run())

    @property
    def id(self) -> str:
        return self.member.id

    @property
    def has_room(self) -> bool:
        """Whether the replica keeps up with what is sent."""
        return self._link is not None and self._link.has_room

    @property
    def is_linked(self) -> bool:
        return self._link is not None

    def update(self, member: Member) -> None:
        """Take the row as it is now."""
        self.member = member
        self._note_change()

    async def close(self) -> None:
        """End the connection and make no other."""
        while not self._running.done():
            # More than once: a connection that fails as it is cancelled ends with its own error.
            self._running.cancel()
            await asyncio.wait([self._running], timeout=CANCEL_SECONDS)
        self.state = ReplicaState.GONE
        if self._link is not None:
            self._link.close()
            self._note_end()
        self._note_change()

    def send(self, message: ToAgent) -> bool:
        """False if there is no connection."""
        return self._link is not None and self._link.send(message)

    def answer_lease(self, number: int, seconds: float) -> None:
        """The database has noted after the agent's question of this number that it lives. A later
        question stays open: what was written before it does not answer it."""
        self.send(LeaseRenewed(number, seconds))
        if self.lease_asked == number:
            self.lease_asked = None

    def refuse_lease(self, error: EngineError) -> None:
        """The agent must not serve: end the connection to it."""
        self._fail(error)

    # --- questions --------------------------------------------------------------------------------

    async def evict(self, key: AdapterKey, drain_seconds: float) -> EvictionReceipt:
        """Return once no tier of the replica holds the adapter. Raises EngineUnavailable if the
        connection ends before."""
        self._check_linked()
        return await self._evictions.ask(key, DeleteAdapter(key, drain_seconds))

    async def explain_adapter(self, key: AdapterKey) -> AdapterExplanation:
        """See `Engine`. Raises EngineUnavailable."""
        self._check_ready()
        return await self._explanations.ask(key, ExplainAdapter(key))

    async def list_requests(self, tenant_id: str | None, limit: int) -> RequestList:
        """See `Engine`. Raises EngineUnavailable."""
        self._check_ready()
        number = next(self._question_numbers)
        return await self._lists.ask(number, ListRequests(number, tenant_id, limit))

    async def map_memory(self) -> MemoryMap:
        """See `EngineClient`. Raises EngineUnavailable."""
        self._check_ready()
        number = next(self._question_numbers)
        return await self._maps.ask(number, MapMemory(number))

    async def wait_for_change(self) -> None:
        """Return when the state, the connection or the row has changed."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.add(change)
        try:
            await change
        finally:
            self._changes.discard(change)

    # --- Receiver ---------------------------------------------------------------------------------

    def take(self, message: FromAgent) -> None:
        match message:
            case StepEvents():
                self._owner.deliver(self, message)
            case EngineStats():
                self.stats = self._adapters.complete(message)
                self.load_pace.add(message.adapter_tiers)
                self._owner.note_stats(self)
            case AdapterWanted(key):
                self._owner.locate(self, key)
            case LeaseAsked(number):
                self.lease_asked = number
            case PrefixPiece():
                self._owner.relay(self, message)
            case ReplicaChanged(state, num_restarts, role):
                self.num_restarts, self.role = num_restarts, role
                self._set_state(state)
            case EngineCrashed():
                self._note_crash(message)
            case AdaptersProven(keys):
                for key in keys:
                    self._owner.note_proven(key)
            case EngineReady(info):
                self.info = info
            case AdapterEvicted(key, receipt):
                self._evictions.answer(key, receipt)
            case AdapterExplanation():
                self._explanations.answer(message.load.key, message)
            case RequestList():
                self._lists.answer(message.number, message)
            case MemoryMap():
                self._maps.answer(message.number, message)
            case _:
                assert_never(message)

    def end(self, error: EngineError) -> None:
        self._note_failure(error)
        self._note_end()

    # --- inside -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            if await self._connect():
                pause = FIRST_PAUSE_SECONDS
                await self._ended.wait()
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _connect(self) -> bool:
        self._ended.clear()
        try:
            await connect(
                self.member.host,
                self.member.port,
                context=self._context,
                answer=self._answer,
                accept=self._accept,
            )
        except EngineError as exc:
            self._note_failure(exc)
            return False
        return True

    def _accept(self, link: ApiLink) -> ReplicaLink:
        self._link = link
        self.failure = None
        self._note_change()
        return self

    def _answer(self, theirs: Hello) -> Hello:
        """Our hello to an agent that has said this. Raises ReplicaReplaced for one whose lease has
        ended."""
        member = self.member
        if theirs.incarnation == member.incarnation and member.has_expired:
            raise ReplicaReplaced("Its lease has ended: it must start anew.")
        base_id, runtime_id = self._owner.check_base(theirs.base_id, theirs.runtime_id)
        if theirs.incarnation != self._last_incarnation:
            self._last_incarnation, self._num_crashes = theirs.incarnation, 0
        self.incarnation = theirs.incarnation
        return Hello(base_id, runtime_id, theirs.incarnation)

    def _note_crash(self, crash: EngineCrashed) -> None:
        if crash.number > self._num_crashes:
            self._num_crashes = crash.number
            self._owner.note_crash(crash)

    def _set_state(self, state: ReplicaState) -> None:
        if state is not self.state:
            if state is ReplicaState.READY:
                self.num_times_ready += 1
            self.state = state
            self._owner.note_state(self)
            if state is ReplicaState.REFUSING:
                self._forget_engine()
        if state is ReplicaState.REFUSING:
            self._give_up_questions()
        self._note_change()

    def _fail(self, error: EngineError) -> None:
        self._note_failure(error)
        if self._link is not None:
            self._link.abort()
            self._note_end()

    def _note_failure(self, error: EngineError) -> None:
        failure = ErrorInfo(error.code, str(error))
        if failure != self.failure:
            _log.warning(
                "replica_not_connected",
                extra={"replica_id": self.id, "code": error.code, "reason": str(error)},
            )
        self.failure = failure

    def _note_end(self) -> None:
        """The connection has ended, with all that was open there."""
        self._link = None
        self.incarnation = self.lease_asked = None
        if self.state is not ReplicaState.GONE:
            self.state = ReplicaState.REFUSING
        self._owner.note_state(self)
        self._forget_engine()
        self._give_up_questions()
        self._evictions.give_up()
        self._owner.note_lost(self)
        self._ended.set()
        self._note_change()

    def _forget_engine(self) -> None:
        """The engine's process has ended, as far as this server knows."""
        self.stats = None
        self._adapters = KnownAdapters()
        self.load_pace = LoadPace()

    def _give_up_questions(self) -> None:
        for questions in (self._explanations, self._lists, self._maps):
            questions.give_up()

    def _note_change(self) -> None:
        for change in self._changes:
            if not change.done():
                change.set_result(None)

    def _check_linked(self) -> None:
        if self._link is None:
            raise EngineUnavailable

    def _check_ready(self) -> None:
        if self.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            raise EngineUnavailable
