"""Several replicas as one engine: what an API server uses instead of an engine of its own."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...adapters.errors import AdapterError, AdapterUnavailable
from ...adapters.identity import AdapterKey
from ...adapters.tier import Tier
from ..errors import AdapterDeleted, EngineUnavailable, ReplicaIncompatible, ReplicaReplaced
from ..messages import (
    AdapterExplanation,
    AdapterFetchFailed,
    AdapterStored,
    BlockFound,
    EngineCrashed,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    EvictionReceipt,
    ForgetOutputs,
    GenerationRequest,
    Prefetch,
    PrefixPiece,
    ReplicaState,
    RequestList,
    SetPinned,
    StepEvents,
    ToAgent,
)
from ..process.engine import Engine, EngineState
from ..process.quarantine import Quarantine
from ..process.request_stream import RequestEvent, RequestStream
from ..token_journal import SlotCounter
from .adapter_name import adapter_name
from .fleet_deletions import evict_everywhere
from .member import Member
from .rendezvous import RendezvousOrder
from .replica_figures import ReplicaFigures, figures_of
from .replica_link import LinkOwner, ReplicaLink
from .replica_state import ReplicaStats
from .replica_view import ReplicaView
from .routed_requests import RoutedRequests
from .router import Router
from .summed_stats import sum_stats
from .warmth import Warmth

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AskedRenewal:
    """An agent's question for its lease."""

    id: str
    """The replica's."""
    number: int
    """The question's: the lease counts from when it was asked."""
    incarnation: str
    base_id: str
    runtime_id: str
    state: ReplicaState
    figures: ReplicaFigures


class Fleet(Engine, LinkOwner):
    """Connects to every member and routes each request to one. `Engine` documents the methods."""

    def __init__(
        self,
        *,
        context: ssl.SSLContext,
        locate: Callable[[AdapterKey], Awaitable[BlockFound]],
        max_requests: int,
    ) -> None:
        """`locate` finds an adapter's block, or raises an AdapterError."""
        self._context = context
        self._locate_block = locate
        self._links: dict[str, ReplicaLink] = {}
        self._order = RendezvousOrder()
        self._router = Router(self._order)
        self._quarantine = Quarantine(time.monotonic)
        self._requests = RoutedRequests(
            self._router,
            self._quarantine,
            self._send,
            has_room=self._has_room,
            share_memory=self._share_memory,
            max_requests=max_requests,
        )
        self._warmth = Warmth()
        self._identity: tuple[str, str] | None = None
        """The base and the runtime that the fleet serves, once they are known."""
        self._info: EngineInfo | None = None
        self._router_states: dict[str, ReplicaState] = {}
        self._stats: EngineStats | None = None
        """Summed on demand; None after a change."""
        self._pinned: list[AdapterKey] = []
        self._pins_as_of = 0.0
        self._is_stopped = False
        self._has_started = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- members ----------------------------------------------------------------------------------

    @property
    def links(self) -> Sequence[ReplicaLink]:
        """The connections to the replicas, in the order in which they were added."""
        return list(self._links.values())

    async def set_members(self, members: Sequence[Member]) -> None:
        """Connect to these replicas and no others."""
        wanted = {member.id: member for member in members}
        for name in [name for name in self._links if name not in wanted]:
            await self._remove(name)
        for member in members:
            link = self._links.get(member.id)
            if link is not None and (link.member.host, link.member.port) != (
                member.host,
                member.port,
            ):
                await self._remove(member.id)
                link = None
            if link is None:
                self._links[member.id] = ReplicaLink(member, context=self._context, owner=self)
                self._router.set_state(member.id, ReplicaState.REFUSING)
                self._router_states[member.id] = ReplicaState.REFUSING
            else:
                self._update(link, member)
        self._warmth.look(self.links)
        self._send_pins()

    def asked_renewals(self) -> list[AskedRenewal]:
        """The questions of agents that wait for an answer."""
        return [
            AskedRenewal(
                id=link.id,
                number=link.lease_asked,
                incarnation=link.incarnation,
                base_id=link.info.base_id,
                runtime_id=link.info.runtime_id,
                state=link.state,
                figures=self._figures_of(link, link.info),
            )
            for link in self._links.values()
            if link.lease_asked is not None and link.incarnation and link.info
        ]

    def views(self) -> list[ReplicaView]:
        """The replicas as this server sees them."""
        return [self._view_of(link) for link in self._links.values()]

    def answer_renewal(self, asked: AskedRenewal, refusal: str | None, seconds: float) -> None:
        """The database has noted that the agent lives, or says why it must not serve."""
        link = self._links.get(asked.id)
        if link is None or link.incarnation != asked.incarnation:
            return
        if refusal is None:
            link.answer_lease(asked.number, seconds)
        else:
            kinds = {kind.code: kind for kind in (ReplicaIncompatible, ReplicaReplaced)}
            kind = kinds.get(refusal, ReplicaReplaced)
            link.refuse_lease(kind(f"The database says {refusal}."))

    def _figures_of(self, link: ReplicaLink, info: EngineInfo) -> ReplicaFigures:
        return figures_of(
            info,
            link.stats,
            num_own=self.num_open_at(link.id),
            queue_p95_seconds=link.queue_times.p95(),
            backlog_seconds=link.load_pace.backlog_seconds(),
            num_restarts=link.num_restarts,
        )

    def _view_of(self, link: ReplicaLink) -> ReplicaView:
        figures = self._figures_of(link, link.info) if link.is_linked and link.info else None
        return ReplicaView(
            id=link.id,
            address=link.member.address,
            role=link.role,
            state=link.state,
            failure=link.failure,
            num_running=figures.num_running if figures else 0,
            num_waiting=figures.num_waiting if figures else 0,
            max_batch=figures.max_batch if figures else 0,
            num_open=self.num_open_at(link.id),
            num_resident=figures.num_resident if figures else 0,
            num_loading=figures.num_loading if figures else 0,
            kv_usage=figures.kv_usage if figures else 0.0,
            arena_bytes=figures.arena_bytes if figures else 0,
            num_restarts=figures.num_restarts if figures else 0,
            device=figures.device if figures else "",
            handovers=self._requests.handovers_of(link.id),
        )

    async def _remove(self, name: str) -> None:
        link = self._links[name]
        self._router.set_state(name, ReplicaState.GONE)
        self._router_states.pop(name, None)
        await link.close()
        self._requests.forget(name)
        del self._links[name]

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when a replica is ready for the first time."""
        await self._has_started.wait()
        if self._is_stopped:
            raise EngineUnavailable

    async def stop(self) -> None:
        self._is_stopped = True
        self._has_started.set()
        self._requests.end_all(EngineUnavailable())
        for name in list(self._links):
            await self._remove(name)
        for task in self._tasks:
            task.cancel()

    @property
    def state(self) -> EngineState:
        if self._is_stopped:
            return EngineState.DOWN
        if any(link.state is ReplicaState.READY for link in self._links.values()):
            return EngineState.READY
        return EngineState.RESTARTING if self._has_started.is_set() else EngineState.STARTING

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def num_restarts(self) -> int:
        return sum(link.num_times_ready for link in self._links.values())

    @property
    def start_seconds(self) -> float | None:
        return None

    @property
    def info(self) -> EngineInfo:
        """Of the smallest replica: what it can serve, each of them can."""
        if self._info is None:
            raise EngineUnavailable
        return self._info

    @property
    def stats(self) -> EngineStats | None:
        """The sum over the replicas."""
        if self._stats is None:
            known = [link.stats for link in self._links.values() if link.stats is not None]
            self._stats = sum_stats(known) if known else None
        return self._stats

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerationRequest,
        take: Callable[[RequestEvent], None] | None = None,
        counter: SlotCounter | None = None,
    ) -> RequestStream:
        if not self.is_ready:
            raise EngineUnavailable
        return self._requests.submit(request, take, counter)

    def num_open_at(self, name: str) -> int:
        """The number of this server's open requests at a replica."""
        return self._requests.num_open_at(name)

    async def list_requests(self, tenant_id: str | None = None, *, limit: int) -> RequestList:
        asked = [link.list_requests(tenant_id, limit) for link in self._ready_links()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        lists = [answer for answer in answers if isinstance(answer, RequestList)]
        if not lists:
            raise EngineUnavailable
        requests = sorted(
            (request for each in lists for request in each.requests),
            key=lambda request: -request.age_seconds,
        )
        return RequestList(0, requests[:limit], sum(each.num_requests for each in lists))

    # --- adapters ---------------------------------------------------------------------------------

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        home = next(iter(self._in_order(key)), None)
        if home is not None and not self._quarantine.holds(key):
            home.send(Prefetch(key, stay_seconds))

    def set_pinned(self, keys: Sequence[AdapterKey], *, as_of: float = 0.0) -> None:
        self._pinned = list(dict.fromkeys(keys))
        self._pins_as_of = as_of
        self._send_pins()

    def note_stored(self, key: AdapterKey) -> None:
        for link in self._ready_links():
            link.send(AdapterStored(key))

    def forget_outputs(self, key: AdapterKey) -> None:
        for link in self.links:
            link.send(ForgetOutputs(key))

    async def evict_adapter(
        self, key: AdapterKey, *, drain_seconds: float = 0.0
    ) -> EvictionReceipt:
        """Return once every replica has let go of the adapter, has been removed, or holds nothing
        because its lease has ended."""
        self._pinned = [pinned for pinned in self._pinned if pinned != key]
        num_aborted = self._requests.end_adapter(key, AdapterDeleted())
        receipt = await evict_everywhere(lambda: self.links, key, drain_seconds=drain_seconds)
        return replace(receipt, num_aborted=receipt.num_aborted + num_aborted)

    async def explain_adapter(self, key: AdapterKey) -> AdapterExplanation:
        """Where it is in the replica that has it, or in the first one that would load it."""
        links = self._in_order(key)
        if not links:
            raise EngineUnavailable
        holder = next((link for link in links if _is_resident(link, key)), links[0])
        return await holder.explain_adapter(key)

    def is_quarantined(self, key: AdapterKey) -> bool:
        return self._quarantine.holds(key)

    # --- LinkOwner --------------------------------------------------------------------------------

    def check_base(self, base_id: str, runtime_id: str) -> tuple[str, str]:
        return self._identity or (base_id, runtime_id)

    def note_state(self, link: ReplicaLink) -> None:
        self._stats = None
        if link.state is ReplicaState.READY:
            self._warmth.begin(link, self.links)
        else:
            self._warmth.bequeath(link, self.links)
            self._requests.lose_prompts(link.id)
        for each in self.links:  # one that warms must serve if no other does
            self._set_router_state(each)
        if link.state is ReplicaState.READY:
            assert link.info is not None
            self._identity = self._identity or (link.info.base_id, link.info.runtime_id)
            self._info = _smallest(
                [link.info, *(each.info for each in self._links.values() if each.info)]
            )
            self._has_started.set()

    def note_stats(self, link: ReplicaLink) -> None:
        stats, info = link.stats, link.info
        assert stats is not None
        assert info is not None
        self._stats = None
        self._router.report(
            link.id,
            ReplicaStats(
                num_requests=stats.num_running + stats.num_waiting,
                max_batch=info.max_num_seqs,
                residents={
                    adapter_name(each.key) for each in stats.adapters if each.tier is Tier.DEVICE
                },
                keeps_prefixes=stats.disk_prefix_bytes > 0 and not stats.num_disks_off,
            ),
        )
        self._set_router_state(link)

    def note_crash(self, crash: EngineCrashed) -> None:
        self._requests.note_crash(crash)

    def note_proven(self, key: AdapterKey) -> None:
        self._quarantine.note_proven(key)

    def note_lost(self, link: ReplicaLink) -> None:
        self._requests.settle(link.id)

    def deliver(self, link: ReplicaLink, events: StepEvents) -> None:
        link.queue_times.add(events.started)
        self._requests.deliver(link.id, events)

    def relay(self, link: ReplicaLink, piece: PrefixPiece) -> None:
        self._requests.relay(link.id, piece)

    def locate(self, link: ReplicaLink, key: AdapterKey) -> None:
        self._begin(self._answer_location(link, key))

    # --- inside -----------------------------------------------------------------------------------

    def _send(self, name: str, message: ToAgent) -> bool:
        link = self._links.get(name)
        return link is not None and link.send(message)

    def _has_room(self, name: str) -> bool:
        link = self._links.get(name)
        return link is not None and link.has_room

    def _share_memory(self, one: str, other: str) -> bool:
        infos = [link.info for name in (one, other) if (link := self._links.get(name))]
        domains = {info.memory_domain if info else None for info in infos}
        return len(infos) == 2 and len(domains) == 1 and None not in domains

    def _update(self, link: ReplicaLink, member: Member) -> None:
        """Take the row of a replica as it is now."""
        was_draining = link.member.is_draining
        link.update(member)
        if member.is_draining and not was_draining:
            self._warmth.bequeath(link, self.links)
        self._set_router_state(link)

    def _set_router_state(self, link: ReplicaLink) -> None:
        """A ready replica gets no requests while it drains, or while it warms and others serve."""
        state = link.state
        if state is ReplicaState.READY and (
            link.member.is_draining or not (self._warmth.is_warm(link) or self._is_alone(link))
        ):
            state = ReplicaState.DRAINING
        if state is not self._router_states.get(link.id):
            self._router_states[link.id] = state
            self._router.set_state(link.id, state, link.role)
            if state is ReplicaState.READY:
                self._requests.note_ready()

    def _is_alone(self, link: ReplicaLink) -> bool:
        states = self._router_states.items()
        return not any(state is ReplicaState.READY for name, state in states if name != link.id)

    def _ready_links(self) -> list[ReplicaLink]:
        return [link for link in self._links.values() if link.state is ReplicaState.READY]

    def _in_order(self, key: AdapterKey) -> list[ReplicaLink]:
        """The ready replicas in the adapter's order."""
        links = (self._links.get(name) for name in self._order.of(adapter_name(key)))
        return [link for link in links if link and link.state is ReplicaState.READY]

    def _send_pins(self) -> None:
        """Pin each adapter on the first live replica of its order. Which are live is read from the
        database, so that all API servers pin alike."""
        live = RendezvousOrder(link.id for link in self._links.values() if link.member.is_live)
        pins: dict[str, list[AdapterKey]] = {}
        for key in self._pinned:
            for name in live.of(adapter_name(key))[:1]:
                pins.setdefault(name, []).append(key)
        for link in self._links.values():
            link.send(SetPinned(pins.get(link.id, []), self._pins_as_of))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_location(self, link: ReplicaLink, key: AdapterKey) -> None:
        try:
            link.send(await self._locate_block(key))
        except AdapterError as exc:
            link.send(AdapterFetchFailed(key, ErrorInfo(exc.code, str(exc))))
        except Exception:  # every question is answered, or its requests would wait for ever
            _log.exception("adapter_not_located", extra={"adapter_digest": key.digest})
            error = AdapterUnavailable()
            link.send(AdapterFetchFailed(key, ErrorInfo(error.code, str(error))))


def _is_resident(link: ReplicaLink, key: AdapterKey) -> bool:
    adapters = link.stats.adapters if link.stats is not None else []
    return any(each.key == key and each.tier is Tier.DEVICE for each in adapters)


def _smallest(infos: Sequence[EngineInfo]) -> EngineInfo:
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        arena_bytes=min(info.arena_bytes for info in infos),
        serves_grammars=all(info.serves_grammars for info in infos),
        endless_obstacle=next(filter(None, (info.endless_obstacle for info in infos)), None),
    )
