"""One seed: an API server with the real router and handovers, and three replicas that it reaches
over late links, on a virtual clock."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import NamedTuple
from unittest import mock

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.record import MAX_BACKOFF_SECONDS
from loraplex.engine.errors import AdapterDeleted
from loraplex.engine.fleet import handovers
from loraplex.engine.fleet.handovers import Handovers
from loraplex.engine.fleet.rendezvous import RendezvousOrder
from loraplex.engine.fleet.replica_state import ReplicaRole, ReplicaState
from loraplex.engine.fleet.routed_requests import RoutedRequests
from loraplex.engine.fleet.router import Router
from loraplex.engine.messages import (
    Abort,
    AdapterEvicted,
    DeleteAdapter,
    FromAgent,
    GenerationRequest,
    Prefetch,
    PrefixPiece,
    RequestStarted,
    StepEvents,
    Submit,
    ToAgent,
)
from loraplex.engine.process.quarantine import Quarantine
from loraplex.engine.process.request_stream import RequestEvent, RequestStream
from simulation.demand import Demand
from simulation.scenario import Scenario
from simulation.violation import Invariant, Violation, require

from .link import DELAYS
from .order import Order
from .replica import Lost, Replica

ROLES: Mapping[str, ReplicaRole] = {
    "d": ReplicaRole.DECODE,
    "e": ReplicaRole.DECODE,
    "p": ReplicaRole.PREFILL,
}
MAX_OPEN = 40
IDLE_SECONDS = 0.002
KILL_SHARE = 0.005
"""Of the rounds."""
DELETE_SHARE = 0.02
ABORT_SHARE = 0.03
FULL_SHARE = 0.05
"""Of the pieces: they find a target that does not keep up."""
MAX_DRAIN_ROUNDS = 6000


class Outcome(NamedTuple):
    """What one seed gave."""

    seed: int
    num_rounds: int
    violation: str | None
    counts: Counter[str]
    log_hash: str


def run_seed(seed: int, num_rounds: int) -> Outcome:
    """`num_rounds` under fire, then calm until every request has ended."""
    return asyncio.run(_run(seed, num_rounds))


async def _run(seed: int, num_rounds: int) -> Outcome:
    world = World(draw_scenario(seed))
    violation = None
    with mock.patch.object(handovers, "MIN_TOKENS", 2 * world.scenario.limits.block_size):
        try:
            world.run(num_rounds)
        except Violation as found:
            violation = str(found)
        except Exception as error:  # an assertion of the code under test is a finding too
            violation = f"{type(error).__name__}: {error}"
    return Outcome(seed, world.num_rounds, violation, world.counts, world.log_hash)


def draw_scenario(seed: int) -> Scenario:
    """With a prefix cache, and neither a disk nor a border: those are the other simulation's."""
    drawn = Scenario.draw(2 * seed + 1)
    slots = tuple(max(each, 2) for each in drawn.num_swap_slots)
    return replace(drawn, prefix_caching=True, num_swap_slots=slots, num_disk_slots=())


@dataclass
class Timer:
    """On the virtual clock."""

    at: float
    action: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class World:
    """Everything of one seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 1000.0
        self.num_rounds = 0
        self.counts: Counter[str] = Counter()
        self._hash = hashlib.blake2b(digest_size=16)
        self._rng = Random(scenario.seed + 1)
        self._demand = Demand(scenario, self._rng)
        self._keys = list(scenario.adapter_sizes)
        self._deleted: set[AdapterKey] = set()
        self._orders: dict[str, Order] = {}
        """Those that have not ended."""
        self._streams: dict[str, RequestStream] = {}
        self._awaiting: set[str] = set()
        """The requests that were sent to wait for a prefix."""
        self._given_up: set[str] = set()
        """Those of them whose prefix does not come."""
        self._source_cached: dict[str, int] = {}
        """By request, what the replica that computed its prompt found in its cache."""
        self._target_cached: dict[str, int] = {}
        self._down: dict[str, float] = {}
        """The replicas that the API server has lost, and when each is back."""
        self._is_calm = False
        self._replicas = {
            name: Replica(name, role, scenario, self._rng, lambda: self.now)
            for name, role in ROLES.items()
        }
        self._router = Router(RendezvousOrder())
        quarantine = Quarantine(lambda: self.now)
        for key in self._keys:
            quarantine.note_proven(key)
        self._requests = RoutedRequests(
            self._router,
            quarantine,
            self._send,
            has_room=self._has_room,
            share_memory=self._share_memory,
            max_requests=1000,
        )
        self._timers: list[Timer] = []
        self._handovers = Handovers(
            self._router,
            self._send,
            self._has_room,
            lambda: self.now,
            self._call_later,
            self._share_memory,
        )
        self._requests._handovers = self._handovers
        for name in ROLES:
            self._make_ready(name)

    @property
    def log_hash(self) -> str:
        return self._hash.hexdigest()

    def run(self, num_rounds: int) -> None:
        """Raises Violation."""
        for _ in range(num_rounds):
            self._strike()
            self._round()
        self._drain()

    def _round(self) -> None:
        self.num_rounds += 1
        seconds = [IDLE_SECONDS]
        for name, replica in self._replicas.items():
            if replica.is_up and self._rng.random() < 0.8:
                seconds.append(replica.step())
            self._receive(name)
        self._fire_timers()
        for name in [name for name, at in self._down.items() if at <= self.now]:
            del self._down[name]
            self._replicas[name].start()
            self._make_ready(name)
            self._requests.note_ready()
        self.now += max(seconds)

    def _drain(self) -> None:
        """Nothing strikes any more: whoever still waits must be served."""
        self._is_calm = True
        self.now += MAX_BACKOFF_SECONDS
        for _ in range(MAX_DRAIN_ROUNDS):
            self._round()
            if not self._orders and self._is_still:
                return self._check_quiescent()
        require(False, Invariant.PROGRESS, f"{list(self._orders)} never end, nothing hinders them")

    @property
    def _is_still(self) -> bool:
        return not self._down and all(
            each.is_up and not each.to_agent and not each.from_agent and not each.num_working
            for each in self._replicas.values()
        )

    def _check_quiescent(self) -> None:
        own = self._handovers
        left = [*own._of, *own._prefills, *self._router._open]
        require(not left, Invariant.QUIESCENT, f"the API server still has {left}")
        for name, replica in self._replicas.items():
            num_held = replica.num_held()
            require(not num_held, Invariant.QUIESCENT, f"{num_held} things are held at {name}")
            self.counts += replica.engine.handed

    # --- what befalls the fleet -------------------------------------------------------------------

    def _strike(self) -> None:
        rng = self._rng
        if rng.random() < self.scenario.arrivals and len(self._orders) < MAX_OPEN:
            for submitted in self._demand.draw(self._demand.tenant()):
                self._submit(submitted)
        if self._streams and rng.random() < ABORT_SHARE:
            self._abort(rng.choice(list(self._streams)))
        if rng.random() < DELETE_SHARE and len(self._deleted) < len(self._keys) // 2:
            self._delete(rng.choice(self._handed_over() or self._keys))
        is_whole = not self._down and all(each.is_up for each in self._replicas.values())
        if is_whole and rng.random() < KILL_SHARE:
            self._kill(rng.choice(list(ROLES)))

    def _submit(self, submitted: GenerationRequest) -> None:
        # Deadlines are timers of the event loop, whose clock is not simulated.
        submitted = replace(submitted, deadline_seconds=None)
        if submitted.adapter in self._deleted:
            return  # an API server finds no version of this name
        name = submitted.request_id
        self._orders[name] = Order(submitted, self.scenario)
        self._streams[name] = self._requests.submit(submitted, partial(self._deliver, name))
        self.counts["requests"] += 1

    def _deliver(self, name: str, event: RequestEvent) -> None:
        order = self._orders[name]
        order.take(event, self._cached_of(name) if isinstance(event, RequestStarted) else range(0))
        self._note(name, event)
        if order.is_over:
            del self._orders[name], self._streams[name]

    def _cached_of(self, name: str) -> range:
        """How many tokens of the prompt may be billed as cached."""
        found = self._target_cached[name]
        if name not in self._awaiting:
            return range(found, found + 1)
        at_most = min(found, self._source_cached.get(name, 0))
        return range(0 if name in self._given_up else at_most, at_most + 1)

    def _handed_over(self) -> list[AdapterKey]:
        """The adapters whose prefixes are on their way."""
        adapters = [
            self._orders[each.request_id].submitted.adapter
            for each in self._handovers._prefills.values()
        ]
        return [adapter for adapter in adapters if adapter]

    def _abort(self, name: str) -> None:
        self._orders[name].allowed.add("aborted")
        self._streams[name].abort()
        self.counts["aborts"] += 1

    def _delete(self, key: AdapterKey) -> None:
        self._deleted.add(key)
        for order in self._orders.values():
            if order.submitted.adapter == key:
                order.allow_deletion()
        drain_seconds = self._rng.choice((0.0, 0.01, 0.1))
        self._requests.end_adapter(key, AdapterDeleted())
        for name, replica in self._replicas.items():
            replica.store.deleted.add(key)
            self._send(name, DeleteAdapter(key, drain_seconds))
        self.counts["deletions"] += 1
        self._note("delete", key)

    def _kill(self, name: str) -> None:
        for order in self._orders.values():
            order.allow_restart()
        self._replicas[name].kill()
        self.counts[f"kills_of_{ROLES[name].value}"] += 1
        self._note("kill", name)

    def _call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(self.now + seconds, action)
        # No replica is silent without an end: without timers, too, every request has to end.
        if self.scenario.seed % 3 == 1:
            self._timers.append(timer)
        return timer

    def _fire_timers(self) -> None:
        due = [timer for timer in self._timers if timer.at <= self.now]
        self._timers = [timer for timer in self._timers if timer.at > self.now]
        for timer in due:
            if not timer.is_cancelled:
                self.counts["late_prefixes"] += 1
                timer.action()

    # --- the API server's links -------------------------------------------------------------------

    def _send(self, name: str, message: ToAgent) -> bool:
        if name in self._down:
            return False
        match message:
            case Submit(request):
                self._note_submitted(request)
            case PrefixPiece(request_id, groups) if not groups:
                self._given_up.add(request_id)
                self.counts["given_up"] += 1
        assert isinstance(message, Submit | Abort | DeleteAdapter | Prefetch | PrefixPiece)
        if self._replicas[name].is_up:  # otherwise nobody reads what is sent
            self._replicas[name].to_agent.send(message, self.now)
        return True

    def _note_submitted(self, request: GenerationRequest) -> None:
        if request.exports_prefix:
            self.counts["handovers"] += 1
        elif request.awaits_prefix:
            self._awaiting.add(request.request_id)
        else:
            self._awaiting.discard(request.request_id)

    def _has_room(self, name: str) -> bool:
        return self._is_calm or self._rng.random() >= FULL_SHARE

    def _share_memory(self, one: str, other: str) -> bool:
        return self.scenario.seed % 4 == 1

    def _receive(self, name: str) -> None:
        link = self._replicas[name].from_agent
        while (message := link.receive(self.now)) is not None:
            self._take(name, message)

    def _take(self, name: str, message: FromAgent | Lost) -> None:
        match message:
            case Lost():
                self._lose(name)
            case StepEvents():
                self._note_started(message)
                self._requests.deliver(name, message)
                self._router.report(name, self._replicas[name].stats())
            case PrefixPiece():
                self._requests.relay(name, message)
            case AdapterEvicted():
                self.counts["deletions_confirmed"] += 1

    def _note_started(self, events: StepEvents) -> None:
        for started in events.started:
            name, _, of = started.request_id.partition("/")
            cached = self._source_cached if of else self._target_cached
            cached[name] = started.num_cached_tokens

    def _lose(self, name: str) -> None:
        for order in self._orders.values():
            order.allow_restart()
        self._down[name] = self.now + 2 * max(DELAYS) * self._rng.random()
        self._router.set_state(name, ReplicaState.REFUSING, ROLES[name])
        self._requests.settle(name)

    def _make_ready(self, name: str) -> None:
        self._router.set_state(name, ReplicaState.READY, ROLES[name])
        self._router.report(name, self._replicas[name].stats())

    def _note(self, *event: object) -> None:
        self._hash.update(repr((round(self.now, 9), event)).encode())
