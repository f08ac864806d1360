"""Messages to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from .error_info import ErrorInfo
from .requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End this request; unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """The answer to AdapterWanted: the verified block lies in this local file."""

    key: AdapterKey
    path: str
    tier: Tier
    """Where the fetcher found it: Tier.STORE or Tier.DISK."""


@dataclass(frozen=True, slots=True)
class AdapterFetchFailed:
    key: AdapterKey
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class DeleteAdapter:
    """Forget this adapter: drop its weights from every tier, and its KV. AdapterEvicted answers.

    No request for it is taken from now on. Those that run have `drain_seconds` to end by
    themselves; whoever is left then, or does not run yet, ends with `adapter_deleted`.
    """

    key: AdapterKey
    drain_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SetPinned:
    """These adapters, and no others, are to stay on the device and come back by themselves.

    In the order of preference: pins hold a part of the arena at most (`pins.MAX_PINNED_PART`), and
    those that do not fit into it any more, which a caller who sends the latest first makes the
    least recently pinned, are adapters like any other.
    """

    keys: list[AdapterKey]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring this adapter to the device though no request names it yet, as after a restart.

    It stays `stay_seconds` at least, unless a waiting request needs the room.
    """

    key: AdapterKey
    stay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterStored:
    """The store has this adapter's block anew: what failed before may be tried again at once."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class ExplainAdapter:
    """Tell why this adapter is where it is; AdapterExplanation answers."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class ListRequests:
    """Tell which requests are in the engine, and what they do; RequestList answers."""

    number: int
    """Comes back with the answer."""
    tenant_id: str | None = None
    """Those of one tenant alone; None: everybody's."""
    limit: int = 500


@dataclass(frozen=True, slots=True)
class MapMemory:
    """Tell where adapters lie, and what KV blocks are used for; MemoryMap answers."""

    number: int
    """Comes back with the answer."""
