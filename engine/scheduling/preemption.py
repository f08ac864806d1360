"""Taking room from those that run: when blocks run out, and for a tenant that waits for its share.

Nobody is preempted while a step with its tokens is in flight: the next step is then scheduled when
this one was read. Torch-free.
"""

from __future__ import annotations

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
            victim = self._running.victim(self._running.kv_share)
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
        self.preempt(self._running.victim(measure), step)
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

    def preempt(self, victim: Request, step: Step) -> None:
        """Stop a running request. It keeps its tokens, and their KV on the host if that is faster
        than recomputing."""
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
        self._waiting.add_front(victim)

    def _pays_to_swap(self, victim: Request) -> bool:
        if not victim.num_computed_tokens:
            return False
        recompute_seconds = self._costs.recompute_seconds(victim.num_computed_tokens)
        return self._swap_costs.round_trip_seconds(victim.kv) <= recompute_seconds
