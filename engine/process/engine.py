"""The interface of an engine for the API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from ...adapters.identity import AdapterKey
from ..messages import (
    AdapterExplanation,
    EngineInfo,
    EngineStats,
    EvictionReceipt,
    GenerationRequest,
    RequestList,
)
from ..token_journal import SlotCounter
from .request_stream import RequestEvent, RequestStream


class EngineState(StrEnum):
    """The state of the engine."""

    STARTING = "starting"
    """It starts for the first time."""
    READY = "ready"
    STALLED = "stalled"
    """It makes no progress and is being killed."""
    RESTARTING = "restarting"
    """Its process died; another one is starting."""
    DOWN = "down"
    """It was stopped, could not start, or died too often. It is not started again."""


class Engine(Protocol):
    """An engine that serves one base model. All methods belong to one event loop."""

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it is ready. From then on it is restarted if it dies.

        Raises UnsupportedModel, InsufficientMemory, InvalidParameter, or EngineUnavailable for all
        other reasons.
        """

    async def stop(self) -> None:
        """Stop the engine; open requests end with an error. Idempotent."""

    @property
    def state(self) -> EngineState:
        """The current state."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests."""

    @property
    def num_restarts(self) -> int:
        """The number of restarts. A restarted engine has lost its prefetches."""

    @property
    def start_seconds(self) -> float | None:
        """The duration of the last successful start; None before the first."""

    @property
    def info(self) -> EngineInfo:
        """The description of the served engine, also during a restart. Raises EngineUnavailable
        before the first start has finished."""

    @property
    def stats(self) -> EngineStats | None:
        """The running engine's latest statistics; None if none runs."""

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerationRequest,
        take: Callable[[RequestEvent], None] | None = None,
        counter: SlotCounter | None = None,
    ) -> RequestStream:
        """Send a request to the engine. The caller must consume or close the stream.

        The stream's `abort` and `close` end the request early. `take`, if given, is called with
        each event when it arrives, instead of iterating; it must not raise. `counter`, if given,
        counts the tokens of each event before the consumer gets it, until the stream is closed.

        Raises EngineUnavailable while the engine is down, InvalidParameter if a request with this
        id is open, Overloaded if too many requests are open, RequestQuarantined or
        AdapterQuarantined.
        """

    async def list_requests(self, tenant_id: str | None = None, *, limit: int) -> RequestList:
        """The sequences in the engine and their states; `tenant_id` None: of all tenants.

        Raises EngineUnavailable while the engine is down.
        """

    # --- adapters ---------------------------------------------------------------------------------

    def prefetch(self, key: AdapterKey, stay_seconds: float = 0.0) -> None:
        """Start loading an adapter to the device; see `Prefetch`. No effect while the engine is
        down."""

    def set_pinned(self, keys: Sequence[AdapterKey], *, as_of: float = 0.0) -> None:
        """Keep exactly these adapters on the device, the most important first; see `SetPinned`.

        An engine that restarts or is down receives them when it is ready.
        """

    def note_stored(self, key: AdapterKey) -> None:
        """The adapter's block was stored again, so a failed load may be retried at once."""

    def forget_outputs(self, key: AdapterKey) -> None:
        """Forget the outputs that are remembered of an adapter version; see `ForgetOutputs`. An
        engine that is down remembers nothing."""

    async def evict_adapter(
        self, key: AdapterKey, *, drain_seconds: float = 0.0
    ) -> EvictionReceipt:
        """Return once no tier of the engine holds the adapter.

        Its running requests may finish within `drain_seconds`; all others end at once. A deletion
        that has begun keeps its own deadline. If the engine is down, it holds nothing.
        """

    async def explain_adapter(self, key: AdapterKey) -> AdapterExplanation:
        """Where an adapter is in the engine, since when, and what it waits for.

        Raises EngineUnavailable while the engine is down.
        """

    def is_quarantined(self, key: AdapterKey) -> bool:
        """Whether the adapter is in quarantine."""
