"""One step's walk over the waiting requests. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic

from .adapter_queues import AdapterQueue, Entry, Ticket, WaitingTenant
from .tenant_order import TenantOrder


class Candidates(Generic[Entry]):
    """The requests that the step may admit: `for request in (walk := queue.candidates()):`.

    Each candidate is answered: by one of the methods below, or by `admit` or `remove` of the queue.
    Only leaving the loop needs no answer. What is added during the walk is not part of it.
    """

    def __init__(
        self, order: TenantOrder[Entry], may_run: Callable[[Entry], bool], last_number: int
    ) -> None:
        """`last_number`: tickets with greater ones are not part of the walk."""
        self._order = order
        self._may_run = may_run
        self._aside: _SetAside[Entry] = _SetAside(last_number)
        self._visits: dict[WaitingTenant[Entry], Visit[Entry]] = {}
        self._place = (0.0, 0)
        """Of the tenant that is visited, when the visit began or went on."""
        self._visit: Visit[Entry] | None = None
        """The candidate's tenant, its queue and its ticket; None once they are answered for."""
        self._queue: AdapterQueue[Entry] | None = None
        self._ticket: Ticket[Entry] | None = None

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        visit = self._put_back()
        while visit or (visit := self._next_visit()):
            if taken := visit.take():
                self._visit, (self._queue, self._ticket) = visit, taken
                return self._ticket.entry
            visit = None
        raise StopIteration

    def park_queue(self) -> None:
        """Its adapter is absent: nothing more of this queue in this step; other queues go on."""
        assert self._visit, "one answer for each candidate"
        assert self._queue, "one answer for each candidate"
        self._visit.park(self._queue)
        self._queue = self._ticket = None

    def skip(self) -> None:
        """Not this request in this step, but the next of its queue: it waits for its group."""
        assert self._queue, "one answer for each candidate"
        self._aside.take_first(self._queue)
        self._ticket = None

    def stop_tenant(self) -> None:
        """A cap is reached: nothing more of this tenant in this step."""
        self._visit = self._queue = self._ticket = None

    def end(self) -> None:
        """Return to their queues those that the walk has set aside."""
        self._aside.put_back()

    def _next_visit(self) -> Visit[Entry] | None:
        tenant = self._order.take()
        if tenant is None:
            return None
        self._place = self._order.place_of(tenant)
        visit = self._visits.get(tenant)
        if visit is None:
            visit = self._visits[tenant] = Visit(tenant, self._aside)
            visit.offer_all(self._may_run)
            if visit.is_held_up:
                self._order.hold_up(tenant)
        return visit

    def _put_back(self) -> Visit[Entry] | None:
        """Put the last candidate's queue and tenant back, unless the walk continues with it."""
        assert self._ticket is None or not self._ticket.is_waiting, "every candidate is answered"
        visit, queue = self._visit, self._queue
        self._visit = self._queue = self._ticket = None
        if visit is None:
            return None
        if queue:
            visit.offer(queue)
        tenant = visit.tenant
        if not tenant.num_waiting:
            return None
        if visit.is_held_up:
            self._order.hold_up(tenant)
            return None
        if self._order.place_of(tenant) == self._place:
            return visit
        self._order.offer(tenant)
        return None


class _SetAside(Generic[Entry]):
    """Tickets that are out of their queues until the walk ends."""

    def __init__(self, last_number: int) -> None:
        self._last_number = last_number
        self._tickets: list[tuple[AdapterQueue[Entry], Ticket[Entry]]] = []

    def first_of(self, queue: AdapterQueue[Entry]) -> Ticket[Entry] | None:
        """The first of a queue, those aside that were added after the walk began."""
        while (ticket := queue.first()) and ticket.number > self._last_number:
            self.take_first(queue)
        return ticket

    def take_first(self, queue: AdapterQueue[Entry]) -> None:
        ticket = queue.first()
        assert ticket, "only what waits is set aside"
        queue.pop()
        self._tickets.append((queue, ticket))

    def put_back(self) -> None:
        for queue, ticket in self._tickets:
            if ticket.is_waiting:
                queue.push(ticket)
        self._tickets.clear()


class Visit(Generic[Entry]):
    """One tenant's part of a walk: its queues that may still be served in this step.

    A queue is in the heap, parked, the candidate's, or has no ticket left for this walk. A heap
    entry has the service as it was when the queue was offered, as in `TenantOrder`.
    """

    def __init__(self, tenant: WaitingTenant[Entry], aside: _SetAside[Entry]) -> None:
        self.tenant = tenant
        self._aside = aside
        self._parked: set[Hashable] = set()
        self._heap: list[tuple[bool, float, int, AdapterQueue[Entry]]] = []

    def offer_all(self, may_run: Callable[[Entry], bool]) -> None:
        """Offer all queues but those whose first request may not run: these are parked."""
        first_of, served = self._aside.first_of, self.tenant.service.counter
        for queue in self.tenant.queues.values():
            if (first := first_of(queue)) is None:
                continue
            if may_run(first.entry):
                place = (not first.is_preempted, served(queue.name), queue.turn, queue)
                self._heap.append(place)
            else:
                self.park(queue)
        heapify(self._heap)

    def park(self, queue: AdapterQueue[Entry]) -> None:
        self._parked.add(queue.name)
        self.tenant.service.deactivate(queue.name)

    def offer(self, queue: AdapterQueue[Entry]) -> None:
        first = self._aside.first_of(queue)
        if first:
            served = self.tenant.service.counter(queue.name)
            heappush(self._heap, (not first.is_preempted, served, queue.turn, queue))

    def take(self) -> tuple[AdapterQueue[Entry], Ticket[Entry]] | None:
        """The queue that is next, out of the heap, and its first ticket."""
        while self._heap:
            was_fresh, was_served, _, queue = heappop(self._heap)
            first, served = self._aside.first_of(queue), self.tenant.service.counter(queue.name)
            if first and (was_fresh, was_served) == (not first.is_preempted, served):
                return queue, first
            self.offer(queue)  # its place in the order is a later one by now
        return None

    @property
    def is_held_up(self) -> bool:
        """Whether every queue of the tenant is parked."""
        queues = self.tenant.queues
        return len(self._parked) >= len(queues) and self._parked.issuperset(queues)
