"""Schemas of a fleet's replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import StringConstraints

from ...engine.messages import ReplicaRole, ReplicaState
from ...platform.replicas.models import ADDRESS_LENGTH
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel


class ReplicaBody(RequestModel):
    """A replica to add."""

    address: Annotated[str, StringConstraints(min_length=1, max_length=ADDRESS_LENGTH)]

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"address": "gpu-1.internal:7070"},)


@dataclass(frozen=True, slots=True)
class ReplicaFailureView(AnswerModel):
    """Why the answering server cannot reach a replica."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class HandoversView(AnswerModel):
    """Prefixes that a prefill replica sent, or a decode replica got, through the answering
    server."""

    num_complete: int
    """Since the server's start, like the next two."""
    num_given_up: int
    """Lost or late: the decode replica computed what was missing."""
    num_bytes: int
    complete_per_second: float
    """In the last 30 s, like the next one."""
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ReplicaConnectionView(AnswerModel):
    """The answering server's connection to a replica. The figures are 0 while there is none."""

    state: ReplicaState
    role: ReplicaRole
    """What its agent was started for: `prefill`, `decode` or `both`."""
    failure: ReplicaFailureView | None
    """Null while it is connected."""
    num_running: int
    """Running requests of all API servers."""
    num_waiting: int
    """Waiting requests of all API servers."""
    max_batch: int
    """Requests that it runs at once."""
    num_open: int
    """The answering server's open requests there."""
    num_resident: int
    """Adapters on its device."""
    num_loading: int
    """Adapters that are being loaded."""
    kv_usage: float
    """Share of KV blocks that requests hold."""
    arena_bytes: int
    """Device memory for adapters."""
    num_restarts: int
    """Restarts of its engine since the agent started."""
    device: str
    handovers: HandoversView


@dataclass(frozen=True, slots=True)
class FleetReplicaView(AnswerModel):
    """A replica of the fleet. The fields that its agent reports are null before it first did."""

    id: str
    address: str
    """`host:port` of its agent."""
    is_draining: bool
    """Whether it accepts no further requests."""
    added_at: datetime
    state: str | None
    """What the agent last reported: `ready`, `draining` or `refusing`."""
    base_id: str | None
    """The base model that it serves."""
    runtime_id: str | None
    """The base model with its quantization and dtype."""
    incarnation: str | None
    """The agent's start; each has its own."""
    seen_at: datetime | None
    """When its lease was last renewed."""
    is_live: bool
    """Whether its lease was renewed within the last 10 s."""
    connection: ReplicaConnectionView | None
    """Null if the answering server is not part of the fleet, or has not read the replica yet."""
    object: Literal["replica"] = "replica"
