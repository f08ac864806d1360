"""The disk budget of uploads in a test's folder."""

from __future__ import annotations

from collections.abc import Callable

from loraplex.api.adapters.staging import Staging
from loraplex.api.adapters.staging_budget import StagingBudget
from loraplex.api.adapters.upload_room import UploadRoom
from loraplex.api.control_plane.control_plane import ControlPlane

GIB = 1 << 30


def make_upload_room(
    staging: Staging,
    control_plane: ControlPlane,
    *,
    total_bytes: int = GIB,
    tenant_bytes: int | None = None,
    free_bytes: Callable[[], int] = lambda: GIB,
    trim_cache: Callable[[int], int] = lambda num_bytes: 0,
    server_id: str = "here",
) -> UploadRoom:
    """A server's room, on a disk of which the test says how much is free."""
    budget = StagingBudget(
        total_bytes=total_bytes,
        tenant_bytes=tenant_bytes,
        free_bytes=free_bytes,
        written_bytes=staging.num_bytes,
    )
    return UploadRoom(
        budget=budget,
        staging=staging,
        control_plane=control_plane,
        server_id=server_id,
        trim_cache=trim_cache,
    )
