"""Injected faults and their rates: each occurs at random, determined by the seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from loraplex.adapters.identity import AdapterKey

from .forward import Faults
from .ledger import Order
from .scenario import Tenant

if TYPE_CHECKING:
    from .world import World

PATIENCE_STEPS = 30
"""A deleted adapter may be pushed again so many steps after the engine let go of it."""


class Nemesis:
    """Acts on the world before each step and chooses the step's faults."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._scenario = world.scenario
        self._coverage = world.coverage
        self._is_resting = False
        self._flooder: Tenant | None = None
        self._flood_steps = 0
        self._gone: list[tuple[int, AdapterKey]] = []
        self._events: tuple[tuple[float, Callable[[], None]], ...] = (
            (0.02, self._abort),
            (0.15, self._abort_preempted),
            (0.02, self._abort_drafting),
            (0.006, self._abort_unknown),
            (0.008, self._disconnect),
            (0.014, self._delete_adapter),
            (0.006, self._begin_outage),
            (0.004, self._jump_clock),
            (0.005, self._burst),
            (0.003, self._flood),
            (0.006, self._ask_too_much),
            (0.001, self._restart),
            (0.06, self._prefetch),
            (0.006, self._pin),
        )

    def strike(self) -> Faults:
        """Ordinary demand and whatever befalls the engine now."""
        self._demand()
        rng, hostility = self._rng, self._scenario.hostility
        for probability, event in self._events:
            if rng.random() < probability * hostility:
                event()
        return self._faults()

    def rest(self) -> None:
        """No more faults, no more demand; all adapters are in the store."""
        self._is_resting = True
        self._world.store.outage_until = self._world.store.mishaps = 0.0
        self._world.store.deleted.clear()

    def breaks_load(self) -> bool:
        return not self._is_resting and self._rng.random() < 0.04 * self._scenario.hostility

    # --- demand ---------------------------------------------------------------------------------

    def _demand(self) -> None:
        world, rng = self._world, self._rng
        if self._flood_steps and self._flooder:
            self._flood_steps -= 1
            world.submit(world.demand.draw(self._flooder))
        expected = self._scenario.arrivals
        while rng.random() < expected:
            expected -= 1.0
            world.submit(world.demand.draw(world.demand.tenant()))

    def _burst(self) -> None:
        tenant = self._rng.choice(self._scenario.tenants)
        for _ in range(self._rng.randint(5, 25)):
            self._world.submit(self._world.demand.draw(tenant))
        self._count("bursts")

    def _flood(self) -> None:
        self._flooder = self._rng.choice(self._scenario.tenants)
        self._flood_steps = self._rng.randint(10, 60)
        self._count("floods")

    def _ask_too_much(self) -> None:
        tenant = self._world.demand.tenant()
        self._world.submit([self._world.demand.draw_too_long(tenant)])
        self._count("never_fit")

    # --- callers who go away --------------------------------------------------------------------

    def _abort(self) -> None:
        if order := self._any_order():
            self._count("aborts")
            self._count(f"aborts_{_state(order)}")
            self._world.abort(order.submitted.request_id)

    def _abort_preempted(self) -> None:
        """Those who had to give way do not wait for long, so they are looked for."""
        states = {"swapped", "preempted"}
        paused = [order for order in self._live() if _state(order) in states]
        if paused:
            order = self._rng.choice(paused)
            self._count(f"aborts_{_state(order)}")
            self._world.abort(order.submitted.request_id)

    def _abort_drafting(self) -> None:
        """Those who draft are few, so they are looked for."""
        drafting = self._world.engine.draft_tokens.drafting
        if orders := [order for order in self._live() if order.request in drafting]:
            self._count("aborts_drafting")
            self._world.abort(self._rng.choice(orders).submitted.request_id)

    def _abort_unknown(self) -> None:
        """An id that never was or has ended, as of an abort that comes too late."""
        self._world.abort(f"r{self._rng.randrange(1_000_000, 2_000_000)}")
        if order := self._any_order():
            self._world.abort(order.submitted.request_id)
            self._world.abort(order.submitted.request_id)
            self._count("aborts_repeated")

    def _disconnect(self) -> None:
        """One caller's connection breaks: all choices of his request, or all of his requests."""
        order = self._any_order()
        if order is None:
            return
        group, tenant_id = order.submitted.group_id, order.submitted.tenant_id
        for other in list(self._world.ledger.live.values()):
            is_same_group = group is not None and other.submitted.group_id == group
            is_same_caller = group is None and other.submitted.tenant_id == tenant_id
            if is_same_group or is_same_caller:
                self._world.abort(other.submitted.request_id)
                self._count("disconnects")

    # --- adapters -------------------------------------------------------------------------------

    def _delete_adapter(self) -> None:
        keys = [order.request.lease.key for order in self._live() if order.request.lease]
        is_leased = bool(keys) and self._rng.random() < 0.8
        if not is_leased:
            keys = list(self._scenario.adapter_sizes)
        if not keys:
            return
        key = self._rng.choice(keys)
        self._world.delete(key, self._rng.choice((0.0, 0.0, 0.02, 0.5, 100.0)))
        self._gone.append((self._world.num_steps + PATIENCE_STEPS, key))
        self._count("deletes")
        self._count("deletes_under_lease", is_leased)

    def _push_again(self) -> None:
        """Deleted versions come back once the engine has answered: the same content, so one key."""
        for due, key in self._gone:
            if due <= self._world.num_steps and key not in self._world.deleting:
                self._world.store.deleted.discard(key)
        self._gone = [entry for entry in self._gone if entry[1] in self._world.store.deleted]

    def _prefetch(self) -> None:
        keys = list(self._scenario.adapter_sizes)
        for key in self._rng.sample(keys, min(len(keys), self._rng.randint(1, 3))):
            self._world.engine.manager.prefetch(key, self._rng.choice((0.0, 0.5, 20.0)))
            self._count("prefetches")

    def _pin(self) -> None:
        keys = list(self._scenario.adapter_sizes)
        if keys:
            self._world.pin(self._rng.sample(keys, self._rng.randint(0, min(3, len(keys)))))
            self._count("pins")

    def _begin_outage(self) -> None:
        self._world.store.outage_until = self._world.now + self._rng.choice((0.02, 0.3, 3.0))
        self._count("outages")

    # --- the machine ----------------------------------------------------------------------------

    def _jump_clock(self) -> None:
        self._world.advance(self._rng.choice((0.5, 5.0, 70.0)))
        self._count("clock_jumps")

    def _restart(self) -> None:
        self._world.restart()

    def _faults(self) -> Faults:
        self._push_again()
        rng, hostility = self._rng, self._scenario.hostility
        nan: frozenset[str] = frozenset()
        poison: frozenset[str] = frozenset()
        if rng.random() < 0.015 * hostility:
            nan = self._some_ids()
            self._world.ledger.allow(nan, "numerical_error")
        if rng.random() < 0.005 * hostility:
            poison = self._some_ids()
            self._world.ledger.allow(poison, "engine_error")
        raises = rng.random() < 0.006 * hostility
        self._count("step_exceptions", raises or bool(poison))
        nan_drafts = rng.random() < 0.02 * hostility
        spreads = rng.random() < 0.5
        crash: frozenset[str] = frozenset()
        if rng.random() < 0.006 * hostility:
            crash = self._some_ids()
        return Faults(nan, raises, poison, nan_drafts, crash, spreads)

    def _some_ids(self) -> frozenset[str]:
        """One request, or a third of all: of them those strike that happen to be in the step."""
        ids = list(self._world.ledger.live)
        if not ids:
            return frozenset()
        count = max(1, len(ids) // 3) if self._rng.random() < 0.3 else 1
        return frozenset(self._rng.sample(ids, count))

    # --- inside ---------------------------------------------------------------------------------

    def _live(self) -> list[Order]:
        return list(self._world.ledger.live.values())

    def _any_order(self) -> Order | None:
        """In each state as likely, however many are in it."""
        by_state: defaultdict[str, list[Order]] = defaultdict(list)
        for order in self._live():
            by_state[_state(order)].append(order)
        if not by_state:
            return None
        return self._rng.choice(by_state[self._rng.choice(sorted(by_state))])

    def _count(self, name: str, number: int = 1) -> None:
        self._coverage[name] += number


def _state(order: Order) -> str:
    request = order.request
    if request.kv.is_swapped:
        return "swapped"
    if request.num_computed_tokens:
        return "running"
    return "preempted" if request.started else "waiting"
