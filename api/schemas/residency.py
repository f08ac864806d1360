"""Schemas of pins, prefetches and a version's readiness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .adapters import Reason

MAX_TTL_SECONDS = 365 * 24 * 3600


class WishBody(RequestModel):
    ttl_seconds: Annotated[float, Field(gt=0, le=MAX_TTL_SECONDS)] | None = None
    """How long it is valid; default: until removed."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"ttl_seconds": 3600.0}, {})


@dataclass(frozen=True, slots=True)
class WishView(AnswerModel):
    """A `pin` keeps a version on the device; a `prefetch` loads it there."""

    kind: str
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class EngineTransitionView(AnswerModel):
    """A state transition of the adapter in the engine."""

    state: str
    seconds_ago: float
    reason: str | None
    """A code, if the state alone does not explain it."""


@dataclass(frozen=True, slots=True)
class LoadView(AnswerModel):
    """The adapter's state in the engine, and what it waits for."""

    state: str
    since_seconds: float | None
    is_pinned: bool
    """The engine keeps it on the device."""
    reason: Reason | None
    """Why the last attempt failed."""
    retry_in_seconds: float | None
    loads_ahead: int
    needed_bytes: int | None
    """Null while its size on the device is unknown, because it is not on this server."""
    free_bytes: int | None
    """This and the next two fields describe the machine; null for tenants."""
    largest_free_bytes: int | None
    """The largest free block; an adapter needs contiguous memory."""
    leased_bytes: int | None
    """In use by running requests; not movable."""
    transitions: Sequence[EngineTransitionView]
    """Latest last."""


@dataclass(frozen=True, slots=True)
class ProposerView(AnswerModel):
    """How well one proposer predicts the version's answers."""

    proposer: str
    acceptance: float
    """Recent acceptance rate of a draft's first token."""
    num_tokens: int
    """Draft tokens for a request in the last step; 0: speculation does not help."""
    drafts: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class ReadinessView(AnswerModel):
    """Whether a version is ready, and if not, why."""

    id: str
    adapter: str
    version: int
    is_ready: bool
    """Requests for it do not wait for its weights."""
    is_servable: bool
    """A request for it is accepted, but may have to wait for the weights."""
    reason: str
    """A code."""
    summary: str
    """The reason as a sentence."""
    retry_after_seconds: float | None
    """When to try again, if known."""
    state: str
    state_changed_at: datetime
    tier: str
    wishes: Sequence[WishView]
    load: LoadView | None
    """Null if the engine has no information about it."""
    speculation: Sequence[ProposerView]
    """One entry per proposer used for it since the engine started."""
    object: Literal["adapter.readiness"] = "adapter.readiness"
