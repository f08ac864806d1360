"""The service that runs evaluations."""

from __future__ import annotations

from contextlib import AsyncExitStack

from ..batches.tenant_files import TenantFiles
from ..evaluations.evaluations import Evaluations
from .planes import Planes
from .readiness import Readiness


def open_evaluations(
    planes: Planes, files: TenantFiles, readiness: Readiness, stack: AsyncExitStack
) -> Evaluations:
    """Nothing of it runs before `start`; `stack` closes it."""
    evaluations = Evaluations(
        control_plane=planes.control_plane,
        leases=planes.leases,
        files=files,
        is_draining=lambda: readiness.is_draining,
    )
    stack.push_async_callback(evaluations.close)
    return evaluations
