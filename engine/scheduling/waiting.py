"""Requests that wait, and the order in which a step offers them to the scheduler.

The tenant with the least service first; within it the adapter with the least; within an adapter's
*line* by priority and arrival, aged: one level of priority is worth `ageing_seconds` of arrival, so
a request lets pass only those of its line that arrive less than (its level - theirs) ·
ageing_seconds after it. Nobody starves, and no key ever changes: the lines are plain heaps.

A walk costs what it looks at: the tenants it visits, all lines of these, and its candidates.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, KeysView
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice, zip_longest
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from .fairness import VirtualTokenCounters


class Waiter(Protocol):
    """What the queue knows of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def tenant_weight(self) -> float: ...
    @property
    def line(self) -> Hashable:
        """The adapter; None is the base model."""

    @property
    def priority(self) -> int:
        """The lower the earlier, within its line."""

    @property
    def arrival_time(self) -> float: ...
    @property
    def deadline(self) -> float | None:
        """The clock's time after which no one wants the answer."""


Entry = TypeVar("Entry", bound=Waiter)


@dataclass(slots=True, eq=False)
class _Ticket(Generic[Entry]):
    """One stay of an entry in the queue; a preempted request comes back with a new one."""

    entry: Entry
    number: int
    is_preempted: bool
    rank: float
    """Arrival, moved by the priority."""
    is_waiting: bool = True


class _Heap(Generic[Entry]):
    """Tickets by key; who left stays inside until it surfaces or the heap is compacted."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], _Ticket[Entry]]] = []

    def push(self, key: tuple[float, ...], ticket: _Ticket[Entry]) -> None:
        heappush(self._heap, ((*key, ticket.number), ticket))

    def first(self) -> _Ticket[Entry] | None:
        while self._heap and not self._heap[0][1].is_waiting:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out what `first` just gave."""
        heappop(self._heap)

    def compact(self, num_waiting: int) -> None:
        """Let go of who left once they outnumber those who may still wait."""
        if len(self._heap) > 2 * num_waiting + 16:
            self._heap = [item for item in self._heap if item[1].is_waiting]
            heapify(self._heap)


class _Line(Generic[Entry]):
    """The waiting requests of one tenant for one adapter."""

    def __init__(self, name: Hashable, turn: int) -> None:
        self.name = name
        self.turn = turn
        """When it was served last: the order among lines of equal service."""
        self.num_waiting = 0
        self._tickets: _Heap[Entry] = _Heap()

    def push(self, ticket: _Ticket[Entry]) -> None:
        self._tickets.push((not ticket.is_preempted, ticket.rank), ticket)

    def first(self) -> _Ticket[Entry] | None:
        return self._tickets.first()

    @property
    def is_urgent(self) -> bool:
        """A preempted request waits in it."""
        first = self.first()
        return first is not None and first.is_preempted

    def pop(self) -> None:
        self._tickets.pop()

    def leave(self) -> None:
        self.num_waiting -= 1
        self._tickets.compact(self.num_waiting)


class _Tenant(Generic[Entry]):
    """The lines of one tenant; exists while it has an entry."""

    def __init__(self, tenant_id: str, turn: int, now: float) -> None:
        self.tenant_id = tenant_id
        self.weight = 1.0
        self.turn = turn
        self.waiting_since = now
        self.num_waiting = 0
        self.lines: dict[Hashable, _Line[Entry]] = {}
        self.service: VirtualTokenCounters[Hashable] = VirtualTokenCounters()

    def lines_in_order(self) -> list[Hashable]:
        """The names of its lines, the next one first."""
        places = [
            (not line.is_urgent, self.service.counter(name), line.turn, name)
            for name, line in self.lines.items()
        ]
        return [name for *_, name in sorted(places, key=itemgetter(0, 1, 2))]


class WaitingQueue(Generic[Entry]):
    """A tenant is active in `counters` while it has an entry that is not held up by its adapter.

    So a tenant whose adapters are all absent earns no credit, nor does its standing still let
    others come back from idleness with some. Request ids are unique among the entries.
    """

    def __init__(
        self,
        counters: VirtualTokenCounters[str],
        clock: Callable[[], float],
        ageing_seconds: float = 30.0,
    ) -> None:
        self.counters = counters
        self.ageing_seconds = ageing_seconds
        self._clock = clock
        self._tenants: dict[str, _Tenant[Entry]] = {}
        self._tickets: dict[str, _Ticket[Entry]] = {}
        self._deadlines: _Heap[Entry] = _Heap()
        self._order: list[tuple[float, int, _Tenant[Entry]]] = []
        """Tenants by service as it once was; it only grows, so who comes up is put right."""
        self._walk: Candidates[Entry] | None = None
        self._turns = count()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, entry: Entry) -> bool:
        return entry.request_id in self._tickets

    def num_of(self, tenant_id: str) -> int:
        tenant = self._tenants.get(tenant_id)
        return tenant.num_waiting if tenant else 0

    @property
    def tenants(self) -> KeysView[str]:
        """Those with an entry."""
        return self._tenants.keys()

    def waited_seconds(self, tenant_id: str) -> float:
        """Since a tenant's last admission or, if later, its first entry; 0 if it has none."""
        tenant = self._tenants.get(tenant_id)
        return self._clock() - tenant.waiting_since if tenant else 0.0

    def add(self, entry: Entry) -> None:
        self._add(entry, is_preempted=False)

    def add_front(self, entry: Entry) -> None:
        """A preempted request: before its tenant's others, whatever their line."""
        self._add(entry, is_preempted=True)

    def remove(self, entry: Entry) -> bool:
        """False if it does not wait. Allowed at any time, during a walk too."""
        ticket = self._tickets.get(entry.request_id)
        if ticket is None:
            return False
        self._leave(ticket)
        return True

    def charge(self, entry: Entry, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charge a request's tenant in `counters`, and its line among the tenant's lines.

        Whether it waits or runs. Lines that are never charged take turns.
        """
        tenant_id, counters = entry.tenant_id, self.counters
        service = counters.service(input_tokens, output_tokens)
        counters.add(tenant_id, service)
        tenant = self._tenants.get(tenant_id)
        if tenant:
            tenant.service.add(entry.line, service)

    def next_lines(self, limit: int) -> list[Hashable]:
        """Lines that wait, of the least served tenants first, one after another of each tenant."""
        counter = self.counters.counter
        tenants = sorted(self._tenants.values(), key=lambda tenant: counter(tenant.tenant_id))
        rounds = zip_longest(*(tenant.lines_in_order() for tenant in tenants))
        names = (name for names in rounds for name in names if name is not None)
        return list(islice(names, limit))

    def candidates(
        self, may_run: Callable[[Entry], bool] = lambda entry: True
    ) -> Candidates[Entry]:
        """The walk of one step; it ends the one before.

        `may_run`: asked once for the first of each line of a tenant that the walk comes to. A line
        for which it says no is parked: with hundreds of adapters on their way, it is what most of
        a walk consists of.
        """
        if self._walk:
            self._undo(self._walk)
        if len(self._order) > 2 * len(self._tenants) + 16:
            self._order = [item for item in self._order if self._is_here(item[-1])]
            heapify(self._order)
        self._walk = Candidates(self, may_run)
        return self._walk

    def _undo(self, walk: Candidates[Entry]) -> None:
        """Return what a walk has set aside, and the tenants it took out of the order."""
        for ticket in walk.skipped:
            if ticket.is_waiting:
                self._line_of(ticket).push(ticket)
        for tenant in walk.taken:
            self._offer(tenant)

    def _take_tenant(self) -> _Tenant[Entry] | None:
        """The tenant with the least service, out of the order."""
        while self._order:
            was_served, _, tenant = heappop(self._order)
            if was_served == self.counters.counter(tenant.tenant_id) and self._is_here(tenant):
                return tenant
            self._offer(tenant)
        return None

    def _offer(self, tenant: _Tenant[Entry]) -> None:
        if self._is_here(tenant):
            heappush(self._order, (*self._place_of(tenant), tenant))

    def _place_of(self, tenant: _Tenant[Entry]) -> tuple[float, int]:
        return self.counters.counter(tenant.tenant_id), tenant.turn

    def _is_here(self, tenant: _Tenant[Entry]) -> bool:
        return self._tenants.get(tenant.tenant_id) is tenant

    def expired(self, now: float) -> list[Entry]:
        """Take out those whose deadline has come, earliest first."""
        entries = []
        while ticket := self._deadlines.first():
            if ticket.entry.deadline is None or ticket.entry.deadline > now:
                break
            self._leave(ticket)
            entries.append(ticket.entry)
        return entries

    def _add(self, entry: Entry, *, is_preempted: bool) -> None:
        assert entry.request_id not in self._tickets, "request ids are unique"
        rank = entry.arrival_time + entry.priority * self.ageing_seconds
        ticket = _Ticket(entry, next(self._turns), is_preempted, rank)
        self._tickets[entry.request_id] = ticket
        tenant = self._tenants.get(entry.tenant_id)
        is_new = tenant is None
        if tenant is None:
            tenant = _Tenant(entry.tenant_id, ticket.number, self._clock())
            self._tenants[entry.tenant_id] = tenant
        line = tenant.lines.get(entry.line)
        if line is None:
            line = tenant.lines[entry.line] = _Line(entry.line, ticket.number)
        tenant.weight = entry.tenant_weight
        tenant.num_waiting += 1
        line.num_waiting += 1
        line.push(ticket)
        if entry.deadline is not None:
            self._deadlines.push((entry.deadline,), ticket)
        self.counters.activate(tenant.tenant_id, tenant.weight)
        tenant.service.activate(line.name)
        if is_new:
            self._offer(tenant)

    def _leave(self, ticket: _Ticket[Entry]) -> None:
        tenant, line = self._tenants[ticket.entry.tenant_id], self._line_of(ticket)
        del self._tickets[ticket.entry.request_id]
        ticket.is_waiting = False
        tenant.num_waiting -= 1
        line.leave()
        self._deadlines.compact(len(self._tickets))
        if not line.num_waiting:
            del tenant.lines[line.name]
            tenant.service.deactivate(line.name)
        if not tenant.num_waiting:
            del self._tenants[tenant.tenant_id]
            self.counters.deactivate(tenant.tenant_id)

    def _admit(self, ticket: _Ticket[Entry]) -> None:
        tenant, line = self._tenants[ticket.entry.tenant_id], self._line_of(ticket)
        # Whoever was held up until now comes back without credit.
        self.counters.activate(tenant.tenant_id, tenant.weight)
        tenant.service.activate(line.name)
        tenant.turn = line.turn = next(self._turns)
        tenant.waiting_since = self._clock()
        self._leave(ticket)

    def _line_of(self, ticket: _Ticket[Entry]) -> _Line[Entry]:
        return self._tenants[ticket.entry.tenant_id].lines[ticket.entry.line]


class _Visit(Generic[Entry]):
    """One tenant's part of a walk: its lines that may still be served in this step."""

    def __init__(
        self,
        tenant: _Tenant[Entry],
        first_of: Callable[[_Line[Entry]], _Ticket[Entry] | None],
    ) -> None:
        self.tenant = tenant
        self.parked: set[Hashable] = set()
        self._first_of = first_of
        self._order: list[tuple[bool, float, int, _Line[Entry]]] = []

    def offer_all(self, may_run: Callable[[Entry], bool]) -> None:
        for line in self.tenant.lines.values():
            first = self._first_of(line)
            if first and not may_run(first.entry):
                self.park(line)
            else:
                self.offer(line)

    def park(self, line: _Line[Entry]) -> None:
        self.parked.add(line.name)
        self.tenant.service.deactivate(line.name)

    def offer(self, line: _Line[Entry]) -> None:
        first = self._first_of(line)
        if first:
            served = self.tenant.service.counter(line.name)
            heappush(self._order, (not first.is_preempted, served, line.turn, line))

    def take(self) -> tuple[_Line[Entry], _Ticket[Entry]] | None:
        while self._order:
            was_fresh, was_served, _, line = heappop(self._order)
            first, served = self._first_of(line), self.tenant.service.counter(line.name)
            if first and (was_fresh, was_served) == (not first.is_preempted, served):
                return line, first
            self.offer(line)  # its place in the order is a later one by now
        return None

    @property
    def is_held_up(self) -> bool:
        lines = self.tenant.lines
        return len(self.parked) >= len(lines) and self.parked.issuperset(lines)


class Candidates(Generic[Entry]):
    """One step's walk: `for request in (walk := queue.candidates()):`.

    Each candidate is answered by one of the methods below, or by removing it from the queue; only
    leaving the loop needs no answer. What is added during the walk is not part of it.
    """

    def __init__(self, queue: WaitingQueue[Entry], may_run: Callable[[Entry], bool]) -> None:
        self._queue = queue
        self._may_run = may_run
        self._end = next(queue._turns)
        self._visits: dict[_Tenant[Entry], _Visit[Entry]] = {}
        self.skipped: list[_Ticket[Entry]] = []
        self.taken: set[_Tenant[Entry]] = set()
        """Tenants that are out of the queue's order: at the candidate, or done with this step."""
        self._place = (0.0, 0)
        self._visit: _Visit[Entry] | None = None
        self._line: _Line[Entry] | None = None
        self._ticket: _Ticket[Entry] | None = None

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        visit = self._put_back()
        while visit or (visit := self._next_visit()):
            if taken := visit.take():
                self._visit, (self._line, self._ticket) = visit, taken
                return self._ticket.entry
            visit = None
        raise StopIteration

    def admitted(self) -> None:
        """It leaves the queue. Charge its input in the loop's body: the order follows at once."""
        assert self._ticket, "one answer for each candidate"
        self._queue._admit(self._ticket)
        self._ticket = None

    def park_line(self) -> None:
        """Its adapter is absent: nothing more of this line in this step; other lines go on."""
        assert self._visit, "one answer for each candidate"
        assert self._line, "one answer for each candidate"
        self._visit.park(self._line)
        self._line = self._ticket = None

    def skip(self) -> None:
        """Not this one in this step, but those behind it: it waits for another of its group."""
        assert self._line, "one answer for each candidate"
        self._set_aside(self._line)
        self._ticket = None

    def stop_tenant(self) -> None:
        """A cap is reached: nothing more of this tenant in this step."""
        self._visit = self._line = self._ticket = None

    def _next_visit(self) -> _Visit[Entry] | None:
        tenant = self._queue._take_tenant()
        if tenant is None:
            return None
        self.taken.add(tenant)
        self._place = self._queue._place_of(tenant)
        visit = self._visits.get(tenant)
        if visit is None:
            visit = self._visits[tenant] = _Visit(tenant, self._first)
            visit.offer_all(self._may_run)
            if visit.is_held_up:
                self._queue.counters.deactivate(tenant.tenant_id)
        return visit

    def _first(self, line: _Line[Entry]) -> _Ticket[Entry] | None:
        """The first of a line, those aside that were added after the walk began."""
        while (ticket := line.first()) and ticket.number > self._end:
            self._set_aside(line)
        return ticket

    def _set_aside(self, line: _Line[Entry]) -> None:
        ticket = line.first()
        assert ticket, "only what waits is set aside"
        line.pop()
        self.skipped.append(ticket)

    def _put_back(self) -> _Visit[Entry] | None:
        """Return the last candidate's line and tenant to the order, unless this goes on with it."""
        assert self._ticket is None or not self._ticket.is_waiting, "every candidate is answered"
        visit, line = self._visit, self._line
        self._visit = self._line = self._ticket = None
        if visit is None:
            return None
        if line:
            visit.offer(line)
        tenant = visit.tenant
        if not tenant.num_waiting:
            return None
        if visit.is_held_up:
            self._queue.counters.deactivate(tenant.tenant_id)
            return None
        if self._queue._place_of(tenant) == self._place:
            return visit
        self.taken.discard(tenant)
        self._queue._offer(tenant)
        return None
