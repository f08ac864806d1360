"""What an API server shows its operators of a replica: its own connection and the last figures."""

from __future__ import annotations

from dataclasses import dataclass

from ..messages import ErrorInfo, ReplicaRole, ReplicaState
from .handover_counts import HandoverFigures


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """As this API server sees it now. Without a connection, the figures are 0."""

    id: str
    address: str
    """`host:port`."""
    role: ReplicaRole
    """Of the last connected agent."""
    state: ReplicaState
    failure: ErrorInfo | None
    """Why there is no connection."""
    num_running: int
    """Requests of all API servers."""
    num_waiting: int
    """Likewise."""
    max_batch: int
    """Requests that it runs at once."""
    num_open: int
    """This API server's requests there."""
    num_resident: int
    """Adapters on its device."""
    num_loading: int
    """Adapters on their way there."""
    kv_usage: float
    """The share of KV blocks that requests hold."""
    arena_bytes: int
    num_restarts: int
    """Of its engine, in the agent's life."""
    device: str
    handovers: HandoverFigures
    """Those that this API server passed on."""
