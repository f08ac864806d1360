"""Waiting requests by tenant and, within a tenant, by adapter. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from .fairness import VirtualTokenCounters


class Waiter(Protocol):
    """The scheduling properties of a waiting request."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def tenant_weight(self) -> float: ...
    @property
    def adapter(self) -> Hashable:
        """The adapter; None is the base model."""

    @property
    def priority(self) -> int:
        """The lower the earlier, within its queue."""

    @property
    def due_time(self) -> float:
        """When its first token is due; see `Request`."""

    @property
    def is_late(self) -> bool:
        """It can no longer meet its TTFT target."""


Entry = TypeVar("Entry", bound=Waiter)


@dataclass(slots=True, eq=False)
class Ticket(Generic[Entry]):
    """One stay of an entry in the queue; a preempted request comes back with a new one."""

    entry: Entry
    number: int
    """Later tickets have greater numbers."""
    is_preempted: bool
    rank: float
    """Its due time, moved by the priority and by being late."""
    is_waiting: bool = True

    @property
    def place(self) -> tuple[bool, float, int]:
        """Its place in its queue; it never changes."""
        return not self.is_preempted, self.rank, self.number


class AdapterQueue(Generic[Entry]):
    """The waiting requests of one tenant for one adapter.

    The heap has every waiting ticket but those that a walk has taken out with `pop`; `push` puts
    them back. Who left stays inside until it surfaces or the heap is compacted.
    """

    def __init__(self, name: Hashable, turn: int) -> None:
        self.name = name
        self.turn = turn
        """When it was served last: the order among queues of equal service."""
        self.num_waiting = 0
        self._heap: list[tuple[tuple[bool, float, int], Ticket[Entry]]] = []

    def enter(self, ticket: Ticket[Entry]) -> None:
        self.num_waiting += 1
        self.push(ticket)

    def leave(self) -> None:
        """One of its tickets does not wait any more."""
        self.num_waiting -= 1
        if len(self._heap) > 2 * self.num_waiting + 16:
            self._heap = [item for item in self._heap if item[1].is_waiting]
            heapify(self._heap)

    def first(self) -> Ticket[Entry] | None:
        while self._heap and not self._heap[0][1].is_waiting:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def push(self, ticket: Ticket[Entry]) -> None:
        heappush(self._heap, (ticket.place, ticket))

    def pop(self) -> None:
        """Take out what `first` just gave."""
        heappop(self._heap)

    @property
    def is_urgent(self) -> bool:
        """A preempted request waits in it."""
        first = self.first()
        return first is not None and first.is_preempted


class WaitingTenant(Generic[Entry]):
    """The queues of one tenant: exactly those in which a request waits.

    It exists as long as it has one. `service` has what each queue was charged; a queue is active in
    it unless a walk has parked it.
    """

    def __init__(self, tenant_id: str, turn: int, now: float) -> None:
        self.tenant_id = tenant_id
        self.weight = 1.0
        self.turn = turn
        """When it was served last: the order among tenants of equal service."""
        self.waiting_since = now
        """Since its last admission or, if later, its first entry."""
        self.num_waiting = 0
        self.queues: dict[Hashable, AdapterQueue[Entry]] = {}
        self.service: VirtualTokenCounters[Hashable] = VirtualTokenCounters()

    def enter(self, ticket: Ticket[Entry]) -> None:
        entry = ticket.entry
        queue = self.queues.get(entry.adapter)
        if queue is None:
            queue = self.queues[entry.adapter] = AdapterQueue(entry.adapter, ticket.number)
        self.weight = entry.tenant_weight
        self.num_waiting += 1
        queue.enter(ticket)
        self.service.activate(queue.name)

    def leave(self, ticket: Ticket[Entry]) -> None:
        queue = self.queues[ticket.entry.adapter]
        ticket.is_waiting = False
        self.num_waiting -= 1
        queue.leave()
        if not queue.num_waiting:
            del self.queues[queue.name]
            self.service.deactivate(queue.name)

    def replace(self, old: Ticket[Entry], new: Ticket[Entry]) -> None:
        """The entry of the waiting ticket goes on waiting with another one."""
        queue = self.queues[old.entry.adapter]
        queue.enter(new)
        old.is_waiting = False
        queue.leave()

    def note_admission(self, ticket: Ticket[Entry], turn: int, now: float) -> None:
        """The waiting ticket is served: the tenant and its queue have had their turn."""
        queue = self.queues[ticket.entry.adapter]
        self.service.activate(queue.name)
        self.turn = queue.turn = turn
        self.waiting_since = now

    def queues_in_order(self) -> list[Hashable]:
        """The names of its queues, the next one first."""
        places = [
            (not queue.is_urgent, self.service.counter(name), queue.turn, name)
            for name, queue in self.queues.items()
        ]
        return [name for *_, name in sorted(places, key=itemgetter(0, 1, 2))]
