"""One replica of the simulated fleet: its engines one after another, its store and its link."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import assert_never

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.fleet.adapter_name import adapter_name
from loraplex.engine.fleet.replica_state import ReplicaRole, ReplicaStats
from loraplex.engine.messages import (
    Abort,
    AdapterEvicted,
    DeleteAdapter,
    FromAgent,
    Prefetch,
    PrefixPiece,
    Submit,
)
from simulation.scenario import Scenario
from simulation.store import FakeStore
from simulation.violation import Invariant, require

from .engine import ReplicaEngine
from .link import Direction

ToReplica = Submit | Abort | DeleteAdapter | Prefetch | PrefixPiece


class Lost:
    """The end of a link."""


class Replica:
    """`to_agent` and `from_agent` are its link; `is_up` from its start to its end."""

    def __init__(
        self,
        name: str,
        role: ReplicaRole,
        scenario: Scenario,
        rng: Random,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.role = role
        self.to_agent: Direction[ToReplica] = Direction(rng)
        self.from_agent: Direction[FromAgent | Lost] = Direction(rng)
        self.store = FakeStore(rng, scenario.adapter_sizes, clock, mishaps=0.0)
        self._scenario = scenario
        self._rng = rng
        self._clock = clock
        self._gone: set[AdapterKey] = set()
        """Whose deletion this engine has confirmed."""
        self._exporting: dict[str, AdapterKey | None] = {}
        self.is_up = True
        self.engine = self._open_engine()

    def kill(self) -> None:
        """The engine ends with all that it has; what it had sent before still arrives."""
        self.is_up = False
        self.engine.close()
        self.to_agent.lose()
        self.from_agent.send(Lost(), self._clock())
        self.store.forget_wishes()

    def start(self) -> None:
        self._gone.clear()
        self.engine = self._open_engine()
        self.is_up = True

    def stats(self) -> ReplicaStats:
        scheduler = self.engine.scheduler
        residents = {adapter_name(key) for key in self.engine.arena.cells if key}
        num_requests = scheduler.num_waiting + scheduler.num_running
        return ReplicaStats(num_requests, self._scenario.limits.max_num_seqs, residents)

    def step(self) -> float:
        """Take what has arrived, run a step, and send what it says; returns its duration."""
        while (message := self.to_agent.receive(self._clock())) is not None:
            self._take(message)
        self.store.answer(self.engine.manager)
        loaders = self.engine.loaders
        while len(loaders) and self._rng.random() < 0.7:
            loaders.run(self._rng.randrange(len(loaders)))
        for answer in self.engine.run_step():
            self._check(answer)
            self.from_agent.send(answer, self._clock())
        for key in self._gone:
            self._check_uncached(key)
        batch = self.engine.executed
        if batch is None:
            return 0.0
        seconds = self._scenario.true_seconds.of(batch.shape, self._rng)
        self.engine.scheduler.observe(batch, seconds, 0.0)
        return seconds

    @property
    def num_working(self) -> int:
        """What goes on by itself."""
        engine = self.engine
        return (
            (not engine.pipeline.is_empty)
            + len(engine.handover.pieces)
            + engine.manager.has_pending_work
            + len(engine.loaders)
        )

    def num_held(self) -> int:
        """What is still held though every request has ended."""
        engine = self.engine
        kv, scheduler = engine.kv, engine.scheduler
        kv.check_integrity([])
        blocks = sum(kv.num_usable(each) - kv.num_free(each) for each in range(len(kv.groups)))
        queued = scheduler.num_waiting + scheduler.num_running
        leases = len(engine.manager._leases)
        return blocks + queued + leases + len(engine.awaiting) + len(engine.handover.pieces)

    def _open_engine(self) -> ReplicaEngine:
        engine = ReplicaEngine(self._scenario, clock=self._clock, want=self.store.want)
        engine.host.files = self.store.files
        return engine

    def _take(self, message: ToReplica) -> None:
        match message:
            case Submit(request):
                if request.exports_prefix:
                    self._exporting[request.request_id] = request.adapter
                self.engine.take(request)
            case Abort(request_id):
                self.engine.abort(request_id)
            case DeleteAdapter(key, drain_seconds):
                self.store.deleted.add(key)
                self.engine.evict(key, drain_seconds)
            case Prefetch(key, stay_seconds):
                self.engine.manager.prefetch(key, stay_seconds)
            case PrefixPiece():
                self.engine.take_prefix(message)
            case _:
                assert_never(message)

    def _check(self, message: FromAgent) -> None:
        if isinstance(message, AdapterEvicted):
            self._gone.add(message.key)
        elif isinstance(message, PrefixPiece) and message.groups:
            adapter = self._exporting[message.request_id]
            require(adapter not in self._gone, Invariant.HANDED_OVER, f"{adapter} is sent")

    def _check_uncached(self, key: AdapterKey) -> None:
        for group in self.engine.kv.groups:
            for cached in (group.cached, group.host.prefixes):
                for prefix in cached._prefixes.values():
                    is_other = prefix.namespace.adapter != key
                    require(is_other, Invariant.HANDED_OVER, f"{key} is cached")
