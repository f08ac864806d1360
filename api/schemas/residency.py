"""What callers wish about where a version's weights are, and what they are told about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from .adapters import Reason
from .request_model import RequestModel

MAX_TTL_SECONDS = 365 * 24 * 3600


class WishBody(RequestModel):
    ttl_seconds: Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS)] | None = None
    """How long the wish stands; None: until it is taken back."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"ttl_seconds": 3600.0}, {})


class WishView(msgspec.Struct, frozen=True):
    """That a version be kept on the device (`pin`) or brought there (`prefetch`)."""

    kind: str
    created_at: datetime
    expires_at: datetime | None


class EngineTransitionView(msgspec.Struct, frozen=True):
    """A state that the adapter entered in the engine."""

    state: str
    seconds_ago: float
    reason: str | None
    """A code, where the state does not say it."""


class LoadView(msgspec.Struct, frozen=True):
    """Where the adapter stands in the engine, and what it takes to get on."""

    state: str
    since_seconds: float | None
    is_pinned: bool
    """The engine keeps it on the device."""
    reason: Reason | None
    """Why the last attempt failed."""
    retry_in_seconds: float | None
    loads_ahead: int
    needed_bytes: int | None
    """None while its size on the device is not known: nothing of it is here."""
    free_bytes: int | None
    """This and the next two are the machine's, which operators see; null for tenants."""
    largest_free_bytes: int | None
    """The largest hole: an adapter lies in one piece."""
    leased_bytes: int | None
    """Under running requests; they are not moved."""
    transitions: Sequence[EngineTransitionView]
    """The latest last."""


class ProposerView(msgspec.Struct, frozen=True):
    """How well one proposer guesses what the version answers."""

    proposer: str
    acceptance: float
    """Lately, of a draft's first token."""
    num_tokens: int
    """Guessed for a request in the last step; 0: it does not pay."""
    drafts: int
    draft_tokens: int
    accepted_tokens: int


class ReadinessView(msgspec.Struct, frozen=True):
    """Why a version does not answer at once, or that it does."""

    id: str
    adapter: str
    version: int
    is_ready: bool
    """A request for it waits for nothing but its turn."""
    is_servable: bool
    """A request for it is taken, though it may have to wait for the weights."""
    reason: str
    """A code."""
    summary: str
    """The same in a sentence."""
    retry_after_seconds: float | None
    """When it is worth asking again, where that is known."""
    state: str
    state_changed_at: datetime
    tier: str
    wishes: Sequence[WishView]
    load: LoadView | None
    """None where the engine has nothing to say about it."""
    speculation: Sequence[ProposerView]
    """Of each proposer that has guessed for it since the engine's start."""
    object: Literal["adapter.readiness"] = "adapter.readiness"
