"""The service that answers batches."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import timedelta

from ..batches.batches import Batches
from ..batches.tenant_files import TenantFiles
from .inference_services import InferenceServices
from .planes import Planes
from .readiness import Readiness


def open_batches(
    planes: Planes, inference: InferenceServices, readiness: Readiness, stack: AsyncExitStack
) -> Batches:
    """Nothing of it runs before the application is there; `stack` closes it."""
    files = TenantFiles(
        planes.settings.data_dir / "files",
        store=planes.fetcher.store,
        control_plane=planes.control_plane,
        room=planes.disk_room,
        kept_for=timedelta(days=planes.settings.file_days),
    )
    batches = Batches(
        control_plane=planes.control_plane,
        leases=planes.leases,
        metering=inference.metering,
        files=files,
        metrics=inference.metrics,
        is_draining=lambda: readiness.is_draining,
    )
    stack.push_async_callback(batches.close)
    return batches
