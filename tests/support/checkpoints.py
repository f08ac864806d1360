"""Checkpoints of fine-tuning jobs in a store on this machine."""

from __future__ import annotations

from pathlib import Path

from loraplex.adapters.disk_room import DiskRoom
from loraplex.adapters.store.local import LocalStore
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.tuning.checkpoint_store import CheckpointStore

RUNTIME = f"sha256:{0:064x}"


def make_checkpoint_store(
    control_plane: ControlPlane,
    directory: Path,
    *,
    server_id: str = "first",
    runtime_id: str = RUNTIME,
) -> CheckpointStore:
    """That of one server."""
    store = LocalStore(directory, reserve_bytes=0)
    return CheckpointStore(
        store,
        control_plane=control_plane,
        room=DiskRoom(directory, 0),
        server_id=server_id,
        runtime_id=runtime_id,
    )
