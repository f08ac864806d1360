"""What the API asks of an engine, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from ...adapters.identity import AdapterKey
from ..messages import (
    AdapterExplanation,
    EngineInfo,
    EngineStats,
    EvictionReceipt,
    GenerationRequest,
    MemoryMap,
    RequestList,
)
from .request_stream import RequestEvent, RequestStream


class EngineState(StrEnum):
    """What the engine is doing, as far as whoever wants to use it is concerned."""

    STARTING = "starting"
    """For the first time."""
    READY = "ready"
    STALLED = "stalled"
    """It made no progress and is being ended."""
    RESTARTING = "restarting"
    """Its process died; the next one is on its way."""
    DOWN = "down"
    """It was stopped, could not start, or died too often: there is no next one."""


class Engine(Protocol):
    """An engine that serves one base model. All methods belong to one event loop."""

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it is ready; from then on it is restarted if it dies.

        Raises UnsupportedModel, InsufficientMemory, InvalidParameter, or EngineUnavailable for all
        other reasons.
        """

    async def stop(self) -> None:
        """End the engine; what is still open ends with an error. Idempotent."""

    @property
    def state(self) -> EngineState:
        """What the engine is doing now."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""

    @property
    def num_restarts(self) -> int:
        """How often the engine was started again. A restarted engine has forgotten prefetches."""

    @property
    def start_seconds(self) -> float | None:
        """How long the last start took that succeeded; None before the first."""

    @property
    def info(self) -> EngineInfo:
        """What the engine serves, also while it restarts. Raises EngineUnavailable before that."""

    @property
    def stats(self) -> EngineStats | None:
        """The last snapshot of the running engine; None while there is none."""

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self, request: GenerationRequest, take: Callable[[RequestEvent], None] | None = None
    ) -> RequestStream:
        """Send a request to the engine; whoever submits must consume or close the stream.

        The stream's `abort` and `close` end the request early. `take` gets each event at once, in
        the place of an iteration; it must not raise.
        Raises EngineUnavailable while the engine is down, InvalidParameter if a request with this
        id is still open, Overloaded if more are open than the engine takes, RequestQuarantined or
        AdapterQuarantined.
        """

    async def until_gone(self, request_ids: Iterable[str]) -> None:
        """Return once no process works on these requests: nothing is counted for them any more."""

    async def list_requests(self, tenant_id: str | None = None, *, limit: int) -> RequestList:
        """Which sequences are in the engine now, and what they do; None: of all tenants.

        Raises EngineUnavailable while there is no engine to ask.
        """

    # --- adapters ---------------------------------------------------------------------------------

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        """Begin to bring an adapter to the device; see `Prefetch`. A down engine forgets it."""

    def set_pinned(self, keys: Sequence[AdapterKey]) -> None:
        """Keep exactly these adapters on the device, most wanted first; see `SetPinned`.

        An engine that restarts, or is down now, is told when it is ready.
        """

    def note_stored(self, key: AdapterKey) -> None:
        """The store has the adapter's block anew: a load that failed may be tried again at once."""

    async def evict_adapter(
        self, key: AdapterKey, *, drain_seconds: float = 0.0
    ) -> EvictionReceipt:
        """Return once no tier of the engine holds the adapter.

        Its running requests have `drain_seconds` to end, all others end at once; a deletion that is
        under way keeps its own deadline. An engine that is down holds nothing.
        """

    async def explain_adapter(self, key: AdapterKey) -> AdapterExplanation:
        """Where an adapter is in the engine, since when, and what it waits for.

        Raises EngineUnavailable while there is no engine to ask.
        """

    def is_quarantined(self, key: AdapterKey) -> bool:
        """Whether requests for this adapter are refused for a while."""

    # --- memory -----------------------------------------------------------------------------------

    async def map_memory(self) -> MemoryMap:
        """Where adapters lie in the engine, and what KV blocks are used for.

        Raises EngineUnavailable while there is no engine to ask.
        """
