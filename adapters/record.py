"""The adapter manager's record of one adapter, from its first request to its eviction."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Generic, NamedTuple

from .extents import Placement
from .identity import AdapterKey
from .memories import BlockT
from .tier import Tier

MIN_STAY_SECONDS = 0.1
"""A resident adapter stays at least this long, which bounds the copying under thrashing."""
UNCLAIMED_STAY_SECONDS = 1.0
"""The same before its first lease, because its request may still be queued."""
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0


class State(StrEnum):
    """The progress of an adapter's load; an adapter without a record is STORED."""

    STORED = "stored"
    """In the store or a cache; no load has begun."""
    FETCHING = "fetching"
    """The fetcher was asked for it."""
    READING = "reading"
    """Its local file is read into host memory, or waits for room there."""
    HOST = "host"
    """In host memory, waiting for room on the device."""
    LOADING = "loading"
    """Being copied into its extent."""
    RESIDENT = "resident"
    """Ready: it can be leased."""
    FAILED = "failed"
    """The last attempt failed; a request after the back-off begins another."""


COMPLETES = {
    State.FETCHING: State.READING,
    State.READING: State.HOST,
    State.HOST: State.LOADING,
    State.LOADING: State.RESIDENT,
}
"""The stages of a load, each with the state that completes it."""

TRANSITIONS = {
    State.STORED: {State.FETCHING, State.HOST},
    State.FETCHING: {State.READING, State.FAILED},
    State.READING: {State.HOST, State.FAILED, State.FETCHING},  # its file was gone
    State.HOST: {State.LOADING, State.FAILED, State.READING, State.FETCHING},  # its block gave way
    State.LOADING: {State.RESIDENT, State.FAILED},
    State.RESIDENT: set[State](),  # until it leaves the device, and its record is forgotten
    State.FAILED: {State.FETCHING, State.HOST},
}
"""The states that may follow each state."""


class Departure(StrEnum):
    """Why an adapter left the device."""

    ROOM = "room"
    """It was the least recently used, and another one needed its space."""
    SHARE = "share"
    """The same, of those that its tenant held beyond its share."""
    DRAINED = "drained"
    """It was drained for an adapter that had waited for a long time."""
    KV = "kv"
    """The KV cache got a part of the arena's memory."""
    DELETED = "deleted"


class Failure(NamedTuple):
    """Why an adapter cannot be loaded now."""

    code: str
    message: str


@dataclass(eq=False)
class Record(Generic[BlockT]):
    """The state machine of one adapter. Times are on the adapter manager's clock."""

    key: AdapterKey
    state: State = State.STORED
    order: int = 0
    """Position among all requests that began a load."""
    source: Tier = Tier.STORE
    """The tier in which the present load found it."""
    begun_at: float = 0.0
    entered_at: float = 0.0
    """When it entered its present state."""
    load_seconds: float = 0.0
    """From the request to the device, of the load that made it resident."""
    is_requested: bool = False
    """Whether a request has asked for it in this attempt, not only a pin or a prefetch."""
    kept_until: float = 0.0
    """When the stay that a prefetch requested ends. A waiting request may end it earlier."""
    stay_seconds: float = 0.0
    """The same for an adapter that is still being loaded."""
    is_moving: bool = False
    """Whether it is being copied to another extent and cannot be leased meanwhile."""
    resident_since: float = 0.0
    last_used: float = 0.0
    paths: tuple[Path, ...] = ()
    """Its local files, as returned by the fetcher in this attempt: one for each part of its key."""
    block: BlockT | None = None
    """In use in host memory while set."""
    placement: Placement | None = None
    leases: set[str] = field(default_factory=set)
    """The ids of the requests that lease it; as a set, no lease can be released twice."""
    is_claimed: bool = False
    """Whether it was leased since it became resident."""
    failure: Failure | None = None
    backoff_seconds: float = 0.0
    """The back-off after the last failure; it doubles with each consecutive failure."""
    retry_at: float = 0.0
    num_unclaimed_bytes: int = 0
    """What its load copied to the device; 0 once a request was charged with it."""
    is_reload: bool = False
    """Whether a somewhat larger arena would still hold it; see `Ghosts`."""
    is_read_again: bool = False
    """Whether somewhat more host memory would still hold its block."""
    was_fetched_again: bool = False
    """Whether its file was missing when it was to be read in this attempt."""

    @property
    def is_idle(self) -> bool:
        return self.state is State.RESIDENT and not self.leases and not self.is_moving

    @property
    def stays_until(self) -> float:
        stay = MIN_STAY_SECONDS if self.is_claimed else UNCLAIMED_STAY_SECONDS
        return self.resident_since + stay

    @property
    def num_placed(self) -> int:
        """Elements of the arena that it holds."""
        return self.placement.extent.size if self.placement is not None else 0

    @property
    def num_elements(self) -> int | None:
        """Elements of the arena that it needs; None while that is not known."""
        if self.placement is not None:
            return self.placement.extent.size
        return self.block.num_elements if self.block is not None else None

    def may_begin_again(self, now: float) -> bool:
        """Whether the last load failed and its back-off is over."""
        return self.state is State.FAILED and now >= self.retry_at

    def begin(self, order: int, now: float) -> None:
        """A load begins, the first one or another after a failure; `enter` follows."""
        self.order = order
        self.begun_at = self.last_used = now
        self.was_fetched_again = self.is_requested = False
        self.paths = ()

    def enter(self, state: State, now: float, failure: Failure | None = None) -> None:
        """`failure` goes with FAILED."""
        assert state in TRANSITIONS[self.state], f"{self.key}: {self.state} → {state}"
        self.state, self.entered_at, self.failure = state, now, failure
        if state is State.RESIDENT:
            self._arrive(now)
        elif state is State.FAILED:
            self._back_off(now)

    def keep(self, stay_seconds: float, now: float) -> None:
        """A prefetch asks for a stay, which begins now or when the adapter arrives."""
        if self.state is State.RESIDENT:
            self.last_used = now
            self.kept_until = max(self.kept_until, now + stay_seconds)
        else:
            self.stay_seconds = max(self.stay_seconds, stay_seconds)

    def _arrive(self, now: float) -> None:
        self.resident_since = self.last_used = now
        self.load_seconds = now - self.begun_at
        self.kept_until = now + self.stay_seconds
        self.backoff_seconds = 0.0

    def _back_off(self, now: float) -> None:
        backoff = max(FIRST_BACKOFF_SECONDS, 2 * self.backoff_seconds)
        self.backoff_seconds = min(backoff, MAX_BACKOFF_SECONDS)
        self.retry_at = now + self.backoff_seconds
        self.stay_seconds = 0.0
