"""The adapter manager's record of one adapter, from its first request to its eviction."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Generic, NamedTuple

from .extents import Placement
from .identity import AdapterKey
from .reading import BlockT
from .tier import Tier as Tier

MIN_STAY_SECONDS = 0.1
"""A resident adapter stays at least this long, which bounds the copying under thrashing."""
UNCLAIMED_STAY_SECONDS = 1.0
"""The same until its first lease: the request that it was loaded for waits for its turn."""


class State(StrEnum):
    """The progress of an adapter's load; an adapter without a record is STORED."""

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


class Departure(StrEnum):
    """Why an adapter left the device."""

    ROOM = "room"
    """It was the least recently used, and another one needed its space."""
    SHARE = "share"
    """The same, of those that its tenant held beyond its share."""
    DRAINED = "drained"
    """It was drained for an adapter that had waited for a long time."""
    DELETED = "deleted"


class Failure(NamedTuple):
    """Why an adapter cannot be had now."""

    code: str
    message: str


@dataclass(eq=False)
class Record(Generic[BlockT]):
    """One adapter's state. Times are readings of residency's clock."""

    key: AdapterKey
    state: State = State.FETCHING
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
    """A request has asked for it in this attempt, not only a pin or a prefetch."""
    kept_until: float = 0.0
    """Until then a prefetch asked for it to stay, unless a request needs the room."""
    stay_seconds: float = 0.0
    """The same for an adapter that is still being loaded."""
    is_moving: bool = False
    """It is being copied to another place in the arena and cannot be leased meanwhile."""
    resident_since: float = 0.0
    last_used: float = 0.0
    path: Path | None = None
    """The path of its local file, as returned by the fetcher in this attempt."""
    block: BlockT | None = None
    """In use in host memory while set."""
    placement: Placement | None = None
    leases: set[str] = field(default_factory=set)
    """Ids of the requests that hold one: a set, so that nothing can be released twice."""
    is_claimed: bool = False
    """Leased at least once since it is resident."""
    failure: Failure | None = None
    backoff_seconds: float = 0.0
    """After the last failure; it doubles with each in a row."""
    retry_at: float = 0.0
    was_fetched_again: bool = False
    """Its file was missing when it was to be read, once in this attempt."""

    @property
    def is_idle(self) -> bool:
        return self.state is State.RESIDENT and not self.leases and not self.is_moving

    @property
    def stays_until(self) -> float:
        stay = MIN_STAY_SECONDS if self.is_claimed else UNCLAIMED_STAY_SECONDS
        return self.resident_since + stay
