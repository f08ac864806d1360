"""Answers about a fleet's replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime

from ...engine.fleet.replica_view import ReplicaView
from ...platform.replicas import service
from ...platform.replicas.models import Replica
from ..fleet.membership import LIVE_SECONDS
from ..schemas.replicas import (
    FleetReplicaView,
    HandoversView,
    ReplicaConnectionView,
    ReplicaFailureView,
)

Views = Mapping[str, ReplicaView]
"""By replica."""


def replica_view(row: Replica, now: datetime, views: Views) -> FleetReplicaView:
    """The row at this time of the database, with the answering server's connection."""
    seen = views.get(row.id)
    return FleetReplicaView(
        id=row.id,
        address=row.address,
        is_draining=row.is_draining,
        added_at=row.added_at,
        state=row.state,
        base_id=row.base_id,
        runtime_id=row.runtime_id,
        incarnation=row.incarnation,
        seen_at=row.seen_at,
        is_live=service.is_live(row, now, LIVE_SECONDS),
        connection=None if seen is None else connection_view(seen),
    )


def connection_view(view: ReplicaView) -> ReplicaConnectionView:
    """The answering server's connection."""
    failure = view.failure
    return ReplicaConnectionView(
        state=view.state,
        role=view.role,
        failure=None if failure is None else ReplicaFailureView(failure.code, failure.message),
        num_running=view.num_running,
        num_waiting=view.num_waiting,
        max_batch=view.max_batch,
        num_open=view.num_open,
        num_resident=view.num_resident,
        num_loading=view.num_loading,
        kv_usage=view.kv_usage,
        arena_bytes=view.arena_bytes,
        num_restarts=view.num_restarts,
        device=view.device,
        handovers=HandoversView(**asdict(view.handovers)),
    )
