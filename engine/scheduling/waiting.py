"""Requests that wait, and the order in which a step offers them to the scheduler.

The tenant with the least service first; within it the adapter with the least; within an adapter's
queue by priority and by the time at which its first token is due, with ageing: one level of
priority is worth `ageing_seconds`, so a request is passed only by those of its queue that are due
less than (their level - its level) · ageing_seconds after it. No request starves. A late request,
which can no longer meet its TTFT target, counts as one level lower: once, it takes another ticket.
Keys never change: queues are plain heaps.

A walk costs what it looks at: the tenants it visits, all queues of these, and its candidates.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import count, islice, zip_longest
from typing import Generic

from .adapter_queues import Entry, Ticket, WaitingTenant
from .candidates import Candidates
from .fairness import Account, VirtualTokenCounters
from .tenant_order import TenantOrder


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
        self.tenants: dict[str, WaitingTenant[Entry]] = {}
        """Those with a ticket, by id."""
        self.tickets: dict[str, Ticket[Entry]] = {}
        """Of those that wait, by request id."""
        self._order: TenantOrder[Entry] = TenantOrder(counters)
        self._walk: Candidates[Entry] | None = None
        self._turns = count()
        """Numbers tickets, admissions and walks in the order of time."""
        self._charged: tuple[Entry, ...] = ()
        """By the last `charge_outputs`."""
        self._accounts: dict[Entry, tuple[Account, Account]] = {}
        """Theirs, in this order."""
        counters.on_forget = self._forget_accounts

    def __len__(self) -> int:
        return len(self.tickets)

    def __contains__(self, entry: Entry) -> bool:
        return entry.request_id in self.tickets

    def num_of(self, tenant_id: str) -> int:
        tenant = self.tenants.get(tenant_id)
        return tenant.num_waiting if tenant else 0

    def waited_seconds(self, tenant_id: str) -> float:
        """Since a tenant's last admission or, if later, its first entry; 0 if it has none."""
        tenant = self.tenants.get(tenant_id)
        return self._clock() - tenant.waiting_since if tenant else 0.0

    def rank(self, entry: Entry) -> float:
        """The lesser, the earlier within its tenant: its due time, moved by priority and
        lateness."""
        return entry.due_time + (entry.priority + entry.is_late) * self.ageing_seconds

    def add(self, entry: Entry) -> None:
        self._add(entry, is_preempted=False)

    def add_front(self, entry: Entry) -> None:
        """A preempted request: before its tenant's others, whatever their queue."""
        self._add(entry, is_preempted=True)

    def defer(self, entry: Entry) -> None:
        """Its rank has grown: it goes on waiting in a later place of its queue. Its tenant's place
        among the others, and what it is owed, stay as they are."""
        old = self.tickets[entry.request_id]
        new = Ticket(entry, next(self._turns), old.is_preempted, self.rank(entry))
        self.tickets[entry.request_id] = new
        self.tenants[entry.tenant_id].replace(old, new)

    def admit(self, entry: Entry) -> None:
        """It leaves the queue to be served. Charge its input at once: the order follows it."""
        ticket = self.tickets[entry.request_id]
        tenant = self.tenants[entry.tenant_id]
        # Whoever was held up until now comes back without credit.
        self.counters.activate(tenant.tenant_id, tenant.weight)
        tenant.note_admission(ticket, next(self._turns), self._clock())
        self._leave(ticket)

    def remove(self, entry: Entry) -> bool:
        """False if it does not wait. Allowed at any time, during a walk too."""
        ticket = self.tickets.get(entry.request_id)
        if ticket is None:
            return False
        self._leave(ticket)
        return True

    def charge(self, entry: Entry, service: float) -> None:
        """Charge a request's queue among its tenant's queues, if the tenant has an entry.

        The request may wait or run. Queues that are never charged alternate.
        """
        if tenant := self.tenants.get(entry.tenant_id):
            tenant.service.add(entry.adapter, service)

    def charge_outputs(self, entries: Iterable[Entry], counts: Iterable[int]) -> None:
        """Charge each entry's tenant and, as `charge` does, its queue for so many output tokens: a
        step has some of every sequence, and mostly of the same ones as the step before. No entry is
        named twice."""
        weight = self.counters.output_weight
        if (charged := tuple(entries)) != self._charged:
            known = self._accounts
            self._charged = charged
            self._accounts = {each: known.get(each) or self._accounts_of(each) for each in charged}
        for (tenant, queue), num_tokens in zip(self._accounts.values(), counts, strict=True):
            service = weight * num_tokens
            tenant.counter += service / tenant.weight
            queue.counter += service / queue.weight

    def _accounts_of(self, entry: Entry) -> tuple[Account, Account]:
        """Of the entry's tenant and of its queue."""
        tenant = self.tenants.get(entry.tenant_id)
        queue = tenant.service.account(entry.adapter) if tenant else Account()
        return self.counters.account(entry.tenant_id), queue

    def _forget_accounts(self) -> None:
        """A tenant has come to wait, or accounts were forgotten: those of entries are others."""
        self._charged, self._accounts = (), {}

    def next_adapters(self, limit: int) -> list[Hashable]:
        """The adapters of waiting queues, least served tenants first, one queue of each tenant at a
        time."""
        counter = self.counters.counter
        tenants = sorted(self.tenants.values(), key=lambda tenant: counter(tenant.tenant_id))
        rounds = zip_longest(*(tenant.queues_in_order() for tenant in tenants))
        names = (name for names in rounds for name in names if name is not None)
        return list(islice(names, limit))

    def candidates(
        self, may_run: Callable[[Entry], bool] = lambda entry: True
    ) -> Candidates[Entry]:
        """The walk of one step; it ends the one before.

        `may_run` is called once for the first request of each queue of a visited tenant. If it is
        False, the queue is parked. With hundreds of adapters being loaded, a walk consists mostly
        of these calls.
        """
        if self._walk:
            self._walk.end()
        self._order.restore(len(self.tenants))
        self._walk = Candidates(self._order, may_run, next(self._turns))
        return self._walk

    def _add(self, entry: Entry, *, is_preempted: bool) -> None:
        assert entry.request_id not in self.tickets, "request ids are unique"
        ticket = Ticket(entry, next(self._turns), is_preempted, self.rank(entry))
        self.tickets[entry.request_id] = ticket
        tenant = self.tenants.get(entry.tenant_id)
        is_new = tenant is None
        if tenant is None:
            tenant = WaitingTenant(entry.tenant_id, ticket.number, self._clock())
            tenant.service.on_forget = self._forget_accounts
            self.tenants[entry.tenant_id] = tenant
            self._forget_accounts()
        tenant.enter(ticket)
        self.counters.activate(tenant.tenant_id, tenant.weight)
        if is_new:
            self._order.offer(tenant)

    def _leave(self, ticket: Ticket[Entry]) -> None:
        tenant = self.tenants[ticket.entry.tenant_id]
        del self.tickets[ticket.entry.request_id]
        tenant.leave(ticket)
        if not tenant.num_waiting:
            del self.tenants[tenant.tenant_id]
            self.counters.deactivate(tenant.tenant_id)
