"""Closes uploads whose server did not return to examine them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import structlog

from ...platform.adapters import upload_upkeep
from ...platform.adapters.models import Upload
from ...platform.adapters.upload_upkeep import UPLOAD_LOST
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.jobs.service import shared_now
from ...platform.sessions import PlatformSession, TenantSession
from ..control_plane.control_plane import ControlPlane

log = structlog.get_logger(__name__)

PATIENCE = timedelta(minutes=30)
"""A server may be stopped for this long, such as for an upgrade, and still resume its uploads."""


async def end_lost_uploads(control_plane: ControlPlane) -> None:
    """A job for one of the servers. Uploads with their bytes in the store wait for a commit.

    Raises a PlatformError.
    """

    def find(session: PlatformSession) -> Sequence[Upload]:
        return upload_upkeep.list_lost(session, shared_now(session) - PATIENCE)

    for upload in await control_plane.read_all_tenants(find):
        await _end(control_plane, upload)


async def _end(control_plane: ControlPlane, upload: Upload) -> None:
    def end(session: TenantSession) -> Changed[bool]:
        is_lost = upload_upkeep.mark_lost(session, upload.id)
        details = {"adapter": upload.adapter_name, "reason": UPLOAD_LOST}
        return Changed(is_lost, Event("upload.refuse", upload.id, details) if is_lost else None)

    if await control_plane.change(upload.tenant_id, BY_SYSTEM, end):
        log.warning("upload_lost", upload_id=upload.id, server_id=upload.server_id)
