"""Which waiting tenant is next: the one with the least service. Torch-free."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic

from .adapter_queues import Entry, WaitingTenant
from .fairness import VirtualTokenCounters

Place = tuple[float, int]
"""Service and turn."""


class TenantOrder(Generic[Entry]):
    """The waiting tenants by service; those of equal service take turns.

    Every waiting tenant is in the heap or, taken out by a walk, in `_taken`. A heap entry has the
    service as it was when the tenant was offered. Service only grows, so no tenant is taken too
    late, and one that is taken too early is offered again.
    """

    def __init__(self, counters: VirtualTokenCounters[str]) -> None:
        self._counters = counters
        self._heap: list[tuple[Place, WaitingTenant[Entry]]] = []
        self._taken: set[WaitingTenant[Entry]] = set()

    def place_of(self, tenant: WaitingTenant[Entry]) -> Place:
        return self._counters.counter(tenant.tenant_id), tenant.turn

    def offer(self, tenant: WaitingTenant[Entry]) -> None:
        """Let the tenant be taken, from now on or again, if anything of it waits."""
        self._taken.discard(tenant)
        if tenant.num_waiting:
            heappush(self._heap, (self.place_of(tenant), tenant))

    def take(self) -> WaitingTenant[Entry] | None:
        """Take out the tenant with the least service."""
        heap = self._heap
        while heap:
            (was_served, _), tenant = heap[0]
            place = self.place_of(tenant)
            if tenant.num_waiting and was_served == place[0]:
                heappop(heap)
                self._taken.add(tenant)
                return tenant
            self._taken.discard(tenant)
            if tenant.num_waiting:
                heapreplace(heap, (place, tenant))
            else:
                heappop(heap)
        return None

    def hold_up(self, tenant: WaitingTenant[Entry]) -> None:
        """No request of the tenant can be served now: it is not active, and earns no credit."""
        self._counters.deactivate(tenant.tenant_id)

    def restore(self, num_tenants: int) -> None:
        """Offer the taken tenants again; drop those without requests once they are the majority."""
        for tenant in tuple(self._taken):
            self.offer(tenant)
        if len(self._heap) > 2 * num_tenants + 16:
            self._heap = [item for item in self._heap if item[1].num_waiting]
            heapify(self._heap)
