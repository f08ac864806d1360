"""Recent state changes of each adapter, with time and reason."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from .identity import AdapterKey

MAX_TRANSITIONS = 16
"""The maximum number of transitions per adapter."""
MAX_ADAPTERS = 1024
"""The maximum number of adapters; the one with the oldest last change is dropped first."""


class Transition(NamedTuple):
    """One change; `at` is on the adapter manager's clock."""

    state: str
    at: float
    reason: str | None


class Histories:
    """A bounded history per adapter. It outlives the adapter's record."""

    def __init__(self) -> None:
        self._transitions: OrderedDict[AdapterKey, deque[Transition]] = OrderedDict()

    def note(self, key: AdapterKey, state: str, at: float, reason: str | None = None) -> None:
        transitions = self._transitions.get(key)
        if transitions is None:
            transitions = self._transitions[key] = deque(maxlen=MAX_TRANSITIONS)
            if len(self._transitions) > MAX_ADAPTERS:
                self._transitions.popitem(last=False)
        self._transitions.move_to_end(key)
        transitions.append(Transition(state, at, reason))

    def of(self, key: AdapterKey) -> tuple[Transition, ...]:
        """Oldest first; empty if nothing is known."""
        return tuple(self._transitions.get(key, ()))

    def last(self, key: AdapterKey) -> Transition | None:
        transitions = self._transitions.get(key)
        return transitions[-1] if transitions else None
