"""How much service each tenant has had: virtual token counters (Sheng et al., OSDI'24), weighted.

Whoever has the least is served next. A tenant is *active* while a request of its waits that could
be served; while two tenants stay active, their services divided by their weights differ by no more
than 2 · max(input_weight · longest prompt, output_weight · tokens running at once) ÷ least weight.
That holds where output_weight ≥ input_weight, a request's longest length is reserved when it is
admitted, and nothing but the order (no cap, no preemption) decides whom to admit.
Torch-free; computes, never acts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)
"""Who shares: tenants; within a tenant, its adapters."""

MAX_IDLE_PARTIES = 4096
"""Idle counters kept before those that a return would lift anyway are forgotten."""


@dataclass(eq=False, slots=True)
class Account:
    """A party's counter: its services, each divided by the weight of that moment."""

    counter: float = 0.0
    weight: float = 1.0


class VirtualTokenCounters(Generic[Party]):
    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self.input_weight = input_weight
        self.output_weight = output_weight
        self._accounts: dict[Party, Account] = {}
        self._active: set[Party] = set()
        self._last_active: Party | None = None
        self._forget_at = MAX_IDLE_PARTIES
        self.on_forget: Callable[[], None] = lambda: None
        """Called when accounts have been forgotten."""

    def __len__(self) -> int:
        """Parties remembered."""
        return len(self._accounts)

    def counter(self, party: Party) -> float:
        """Weighted tokens served so far, divided by the party's weight, lifts included."""
        account = self._accounts.get(party)
        return account.counter if account else 0.0

    def is_active(self, party: Party) -> bool:
        return party in self._active

    def activate(self, party: Party, weight: float = 1.0) -> None:
        """The party has something to be served from now on; what it missed while idle is gone.

        Its counter is lifted to the least of the active ones or, if there are none, to that of the
        party that was active last: idleness earns no credit. `weight` counts for later charges.
        """
        assert weight > 0, "a tenant's weight is positive"
        account = self.account(party)
        account.weight = weight
        if party in self._active:
            return
        account.counter = max(account.counter, self._floor())
        self._active.add(party)

    def deactivate(self, party: Party) -> None:
        """The party has nothing more to be served now; what of it runs is still charged."""
        if party not in self._active:
            return
        self._active.remove(party)
        self._last_active = party
        if len(self._accounts) - len(self._active) > self._forget_at:
            self._forget_lifted()

    def charge(self, party: Party, input_tokens: int = 0, output_tokens: int = 0) -> float:
        """Charge the party for so many tokens; return the service that they come to."""
        service = self.input_weight * input_tokens + self.output_weight * output_tokens
        self.add(party, service)
        return service

    def add(self, party: Party, service: float) -> None:
        """Charge the party with a service that is known."""
        account = self._accounts.get(party) or self.account(party)
        account.counter += service / account.weight

    def account(self, party: Party) -> Account:
        """The party's, until accounts are forgotten."""
        return self._accounts.setdefault(party, Account())

    def _floor(self) -> float:
        """Never falls: who joins is lifted to it, and service only adds."""
        if self._active:
            return min(self._accounts[party].counter for party in self._active)
        return 0.0 if self._last_active is None else self.counter(self._last_active)

    def _forget_lifted(self) -> None:
        floor = self._floor()
        for party, account in [*self._accounts.items()]:
            if party not in self._active and account.counter < floor:
                del self._accounts[party]
        self.on_forget()
        # Where few could be forgotten the next attempt waits, so that attempts stay cheap overall.
        num_idle = len(self._accounts) - len(self._active)
        self._forget_at = max(MAX_IDLE_PARTIES, 2 * num_idle)
