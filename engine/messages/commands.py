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
    """End this request. Unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AdapterFetched:
    """The answer to AdapterWanted: the verified blocks of the adapter's parts are in these local
    files."""

    key: AdapterKey
    paths: tuple[str, ...]
    """In the order of `AdapterKey.parts`."""
    tier: Tier
    """The tier where the fetcher found them: Tier.STORE, unless all were on Tier.DISK."""


@dataclass(frozen=True, slots=True)
class AdapterFetchFailed:
    key: AdapterKey
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class DeleteAdapter:
    """Remove this adapter's weights from every tier, and its KV blocks. The answer is
    AdapterEvicted.

    Requests for it are refused from now on. Running requests may finish within `drain_seconds`.
    After that, the remaining ones and those that have not started end with `adapter_deleted`.
    """

    key: AdapterKey
    drain_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SetPinned:
    """Keep exactly these adapters on the device; load them again if they are evicted.

    The most important come first. Pins hold at most a part of the arena (`pins.MAX_PINNED_PART`).
    Adapters that do not fit into this part are not pinned.
    """

    keys: list[AdapterKey]
    as_of: float = 0.0
    """When they were read from the database, in seconds since 1970 by its clock. An agent ignores
    what was read before that which it has."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Load this adapter to the device before a request names it.

    It stays for at least `stay_seconds`, unless a waiting request needs the room.
    """

    key: AdapterKey
    stay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterStored:
    """This adapter's block was stored again: a failed load may be retried at once."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class ForgetOutputs:
    """Forget the outputs that are remembered of this adapter version: its tenant keeps no samples
    any more, or has deleted them. Those of its open requests are not remembered either."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class ExplainAdapter:
    """Ask where this adapter is and why. The answer is AdapterExplanation."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class ListRequests:
    """Ask for the requests in the engine and their states. The answer is RequestList."""

    number: int
    """Repeated in the answer."""
    tenant_id: str | None = None
    """Only the requests of this tenant; None: of all tenants."""
    limit: int = 500


@dataclass(frozen=True, slots=True)
class MapMemory:
    """Ask for the positions of adapters and the use of KV blocks. The answer is MemoryMap."""

    number: int
    """Repeated in the answer."""
