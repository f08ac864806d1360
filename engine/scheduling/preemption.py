"""Taking room from those that run: when blocks run out, for a tenant that waits for its share, and
for a request of the same tenant with a higher priority.

Nobody is preempted while a step with its tokens is in flight: the next step is then scheduled when
this one was read. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from ..kv.blocks import KvBlocks
from ..request import Request
from .adapter_leases import AdapterLeases
from .batch import Step
from .running import ROUNDING, Measure, Running
from .step_costs import StepCosts
from .swap_costs import SwapCosts
from .waiting import WaitingQueue

RECLAIM_SECONDS = 0.03
RECLAIM_STEPS = 5
"""So long a tenant waits for what others hold beyond their share, before it is taken from them."""

IsEnough = Callable[[Sequence[Request]], bool]
"""Whether these requests give a waiting one what it lacks."""


class Preemption:
    """Victims go back to the front of their tenant's queue, swapped out or to be computed again."""

    def __init__(
        self,
        *,
        running: Running,
        waiting: WaitingQueue[Request],
        kv: KvBlocks,
        leases: AdapterLeases,
        costs: StepCosts,
        swap_costs: SwapCosts,
        tenant_cap: float,
    ) -> None:
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_reclaims = 0
        self.num_displaced = 0
        self._running = running
        self._waiting = waiting
        self._kv = kv
        self._leases = leases
        self._costs = costs
        self._swap_costs = swap_costs
        self._tenant_cap = tenant_cap
        self._blocked_tenant = ""
        self._num_blocked_steps = 0

    def make_room(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Allocate blocks for a running request and preempt others for them; False if the request
        itself was preempted, or nobody may be.

        A request that runs alone always finds room: one that would not fit is never admitted.
        """
        while not self._kv.grow(request.kv, request.num_computed_tokens, num_tokens):
            step.is_short = True
            if step.is_ahead:
                step.is_held_up = True
                return False
            victim = self._victim(self._running.kv_share)
            self.preempt(victim, step)
            if victim is request:
                return False
        return True

    def note_blocked(self, request: Request) -> None:
        """The first waiting request finds no room in this step."""
        if request.tenant_id != self._blocked_tenant:
            self._blocked_tenant, self._num_blocked_steps = request.tenant_id, 0
        self._num_blocked_steps += 1

    def reclaim(self, request: Request, measure: Measure, share: float, step: Step) -> bool:
        """Preempt a request of a tenant above its share for one that has waited long enough.

        `share` is the part of the resource that the request needs.
        """
        if not self.may_reclaim(request, measure, share):
            return False
        if step.is_ahead:
            step.is_held_up = True
            return False
        self.num_reclaims += 1
        self.preempt(self._victim(measure), step)
        return True

    def may_reclaim(self, request: Request, measure: Measure, share: float) -> bool:
        is_blocked = self._blocked_tenant == request.tenant_id
        has_waited = is_blocked and self._num_blocked_steps >= RECLAIM_STEPS
        if not has_waited and self._waiting.waited_seconds(request.tenant_id) < RECLAIM_SECONDS:
            return False
        would_hold = measure(request.tenant_id) + share
        if would_hold > self._tenant_cap + ROUNDING and self._running.num_of(request.tenant_id):
            return False  # the preempted request will wait, so the cap applies to the others
        return self._running.owes(request, measure, share)

    def displace(self, request: Request, is_enough: IsEnough, step: Step) -> bool:
        """Preempt requests of the same tenant with a lower priority, if they give enough.

        They come back by their rank, after the request that displaced them.
        """
        victims = self._displaceable(request, is_enough)
        if victims and step.is_ahead:
            step.is_held_up = True
            return False
        for victim in victims:
            self.num_displaced += 1
            self._stop(victim, step)
            self._waiting.add(victim)
        return bool(victims)

    def may_displace(self, request: Request, is_enough: IsEnough) -> bool:
        """Whether `displace` would find as many as are enough."""
        return bool(self._displaceable(request, is_enough))

    def _displaceable(self, request: Request, is_enough: IsEnough) -> Sequence[Request]:
        """As many as are enough, the lowest priority first; nobody if all together are not.

        Only those whose rank is greater too: who has been there for long enough stays.
        """
        rank, lower = self._waiting.rank, self._running.of_lower_priority(request)
        lower = [other for other in lower if rank(other) > rank(request)]
        lower.sort(key=attrgetter("priority"), reverse=True)
        parts = (lower[:count] for count in range(1, len(lower) + 1))
        return next(filter(is_enough, parts), ())

    def _victim(self, measure: Measure) -> Request:
        """The newest request of the tenant that holds most, or one that it may displace."""
        newest = self._running.victim(measure)
        return next(iter(self._displaceable(newest, bool)), newest)

    def preempt(self, victim: Request, step: Step) -> None:
        """Stop a running request; it comes back before its tenant's others."""
        self._stop(victim, step)
        self._waiting.add_front(victim)

    def _stop(self, victim: Request, step: Step) -> None:
        """It keeps its tokens, and their KV on the host if that is faster than recomputing."""
        self.num_preemptions += 1
        victim.num_preemptions += 1
        step.cancel(victim)
        self._running.stop(victim)
        num_kept = 0
        if self._pays_to_swap(victim):
            num_kept = self._kv.swap_out(victim.kv, victim.num_computed_tokens)
        if num_kept:
            self.num_swaps += 1
        else:
            self._kv.release(victim.kv)
        victim.num_computed_tokens = num_kept
        self._leases.give_back(victim)

    def _pays_to_swap(self, victim: Request) -> bool:
        if not victim.num_computed_tokens:
            return False
        recompute_seconds = self._costs.recompute_seconds(victim.num_computed_tokens)
        return self._swap_costs.round_trip_seconds(victim.kv) <= recompute_seconds
