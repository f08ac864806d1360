"""Messages between an agent and an API server, besides those of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...adapters.identity import AdapterKey


class ReplicaState(StrEnum):
    """A replica pushes a change of its state at once, apart from its statistics."""

    READY = "ready"
    """It accepts requests."""
    DRAINING = "draining"
    """It finishes its requests and accepts no others."""
    REFUSING = "refusing"
    """Its engine restarts or does not respond."""
    GONE = "gone"
    """It left the fleet."""


class ReplicaRole(StrEnum):
    """Which part of requests a replica is for."""

    PREFILL = "prefill"
    """It computes prompts for others, and whole requests only if no other replica is ready."""
    DECODE = "decode"
    """It takes requests, and prefixes of long prompts from others."""
    BOTH = "both"
    """It takes requests, and computes their prompts itself."""


@dataclass(frozen=True, slots=True)
class ReplicaChanged:
    """From the agent: its state now."""

    state: ReplicaState
    num_restarts: int
    """Of its engine, since the agent's start."""
    role: ReplicaRole = ReplicaRole.BOTH


@dataclass(frozen=True, slots=True)
class EngineCrashed:
    """From the agent: its engine ended in a step, and what was in its forward pass is suspect."""

    fingerprints: list[bytes]
    """Of the pass's requests; see `quarantine.fingerprint`."""
    adapters: list[AdapterKey]
    tenant_ids: list[str]
    is_alone: bool
    """Whether the pass had requests for one adapter only, or one request for the base."""
    number: int = 0
    """Of the agent's crashes, from 1 on. An API server that connects is told of the last ones, so
    that it has the suspects of the others."""
    seconds_ago: float = 0.0


@dataclass(frozen=True, slots=True)
class AdaptersProven:
    """From the agent: these adapters have answered often enough (`process.proven_adapters`)."""

    keys: list[AdapterKey]


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """From the agent: renew the lease under which it serves. The answer is LeaseRenewed."""

    number: int
    """Repeated in the answer."""


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """To the agent: the lease was renewed after it was asked for, so it ends `seconds` after that
    at the earliest."""

    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockFound:
    """To the agent, the answer to AdapterWanted: what to fetch from the store. The other answer is
    AdapterFetchFailed."""

    key: AdapterKey
    sha256: str
    """Of the block, in hexadecimal digits."""
    size_bytes: int
