"""Requests that wait, and the order in which a step offers them to the scheduler.

The tenant with the least service first; within it the adapter with the least; within an adapter's
*line* by priority and arrival, aged. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, KeysView
from typing import Generic, Protocol, TypeVar

from .fairness import TokenCounters


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
    def priority(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def deadline(self) -> float | None:
        """The clock's time after which no one wants the answer."""


Entry = TypeVar("Entry", bound=Waiter)


class WaitingQueue(Generic[Entry]):
    """A tenant is active in `counters` while it has an entry that is not held up by its adapter."""

    def __init__(
        self, counters: TokenCounters[str], clock: Callable[[], float], ageing_seconds: float = 30.0
    ) -> None: ...

    def __len__(self) -> int: ...
    def __contains__(self, entry: Entry) -> bool: ...
    def num_of(self, tenant_id: str) -> int: ...
    @property
    def tenants(self) -> KeysView[str]:
        """Those with an entry."""

    def add(self, entry: Entry) -> None: ...
    def add_front(self, entry: Entry) -> None:
        """A preempted request: before its tenant's others, whatever their line."""

    def remove(self, entry: Entry) -> bool:
        """False if it does not wait; allowed at any time, during a walk too."""

    def charge(self, entry: Entry, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charge a request's tenant in `counters`, and its line among the tenant's lines."""

    def candidates(self) -> Candidates[Entry]: ...
    def expired(self, now: float) -> list[Entry]:
        """Take out those whose deadline has passed."""


class Candidates(Generic[Entry]):
    """One step's walk: `for request in (walk := queue.candidates()):`, each answered by one of these.

    Removing the candidate from the queue is an answer too; leaving the loop needs none.
    """

    def __iter__(self) -> Iterator[Entry]: ...
    def __next__(self) -> Entry: ...
    def admitted(self) -> None:
        """It leaves the queue. Charge its input in the loop's body: the order follows at once."""

    def park_line(self) -> None:
        """Its adapter is absent: nothing more of this line in this step; other lines go on."""

    def skip(self) -> None:
        """Not this one in this step; those behind it may pass (a group's followers)."""

    def stop_tenant(self) -> None:
        """A cap is reached: nothing more of this tenant in this step."""
