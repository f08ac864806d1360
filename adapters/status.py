"""The adapter manager's reports. The engine's messages contain them as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from .identity import AdapterKey
from .load_times import SecondsHistogram
from .record import Departure, Failure
from .tier import Tier


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """Where one adapter is."""

    key: AdapterKey
    tier: Tier
    device_bytes: int
    num_leases: int


@dataclass(frozen=True, slots=True)
class AdapterChanges:
    """The adapters whose status changed since it was last asked for."""

    statuses: list[AdapterStatus]
    """Most recently used first."""
    gone: list[AdapterKey]
    """Those that are no longer in memory, requested or failed."""


@dataclass(frozen=True, slots=True)
class AdapterTransition:
    """One change of an adapter's state."""

    state: str
    """As in `AdapterLoad.state`."""
    seconds_ago: float
    reason: str | None = None
    """The code of a failure or the reason of an eviction; None for the next step of a load."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Where an adapter is, and what it waits for."""

    key: AdapterKey
    state: str
    """One of `record.State`, or `deleting`. `stored`: no request has named it."""
    tier: Tier
    """The fastest tier that has it."""
    since_seconds: float | None
    """How long it has been in this state; None if it was never in another."""
    reason: Failure | None
    """Why the last attempt failed."""
    retry_in_seconds: float | None
    """When a request may begin the next attempt, if the last one failed."""
    order: int
    """The number of loads ahead of this one; 0 if it does not wait."""
    needed_bytes: int | None
    """Its size on the device; None while no tier of the engine has it."""
    free_bytes: int
    """Free bytes of the arena."""
    largest_free_bytes: int
    """The largest contiguous free range of the arena."""
    leased_bytes: int
    """Bytes of adapters that running requests lease; they cannot be evicted now."""
    is_pinned: bool
    transitions: list[AdapterTransition] = field(default_factory=list)
    """The latest ones, oldest first."""


@dataclass(frozen=True, slots=True)
class ExtentUse:
    """One adapter's extent in the arena."""

    key: AdapterKey
    offset_bytes: int
    num_bytes: int
    state: str
    """`leased`, `idle` or `loading`."""
    is_pinned: bool
    num_leases: int
    idle_seconds: float
    """Time since its last use; 0 while it is leased or being loaded."""
    eviction_order: int | None
    """0 for the adapter that is evicted first; None if it cannot be evicted."""


@dataclass(frozen=True, slots=True)
class HostUse:
    """One adapter's block in host memory."""

    key: AdapterKey
    num_bytes: int
    is_pinned: bool
    is_in_use: bool


@dataclass(frozen=True, slots=True)
class AdapterTierStats:
    """What the engine's adapter tiers hold, and counters since its start."""

    bytes_by_tier: dict[Tier, int] = field(default_factory=dict)
    """Bytes on the device and in host memory."""
    num_leases: int = 0
    leased_bytes: int = 0
    pinned_bytes: int = 0
    """Device bytes of pinned adapters."""
    free_bytes: int = 0
    """Free bytes of the arena."""
    largest_free_bytes: int = 0
    """The largest contiguous free range of the arena."""
    awaited_bytes: int = 0
    """Of the adapters that waiting requests need and that are not on the device. Until an adapter
    has been read, its size is taken to be the mean of those on the device."""
    loaded_bytes: int = 0
    """Copied to the device."""
    evictions: dict[Departure, int] = field(default_factory=dict)
    """Adapters that left the device, by reason."""
    num_leases_reaped: int = 0
    """Leases whose requests no longer existed. Each is a defect."""
    num_moves: int = 0
    """Adapters moved within the arena to join free ranges."""
    moved_bytes: int = 0
    load_seconds: dict[str, SecondsHistogram] = field(default_factory=dict)
    """By stage: fetch, read, wait (for device memory) and copy."""

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes that is outside the largest free range."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0
