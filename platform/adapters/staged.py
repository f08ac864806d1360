"""The uploads whose bytes are on one server's disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import func, select

from ..sessions import PlatformSession
from .models import Upload
from .states import UNFINISHED_UPLOAD_STATES


class StagedUpload(NamedTuple):
    """An unfinished upload."""

    id: str
    tenant_id: str
    adapter_name: str
    num_bytes: int
    """Of all that was declared: the weights and their configuration."""
    updated_at: datetime


def list_staged(session: PlatformSession, server_id: str) -> Sequence[StagedUpload]:
    """This server's unfinished uploads, those first that have been silent for the longest time."""
    query = (
        select(
            Upload.id,
            Upload.tenant_id,
            Upload.adapter_name,
            Upload.size_bytes + func.length(Upload.config_json),
            Upload.updated_at,
        )
        .where(Upload.state.in_(UNFINISHED_UPLOAD_STATES), Upload.server_id == server_id)
        .order_by(Upload.updated_at, Upload.id)
    )
    return [StagedUpload(*row) for row in session.execute(query)]


def list_closed(session: PlatformSession, upload_ids: Collection[str]) -> Sequence[str]:
    """Which of these uploads have ended."""
    query = select(Upload.id).where(
        Upload.id.in_(upload_ids), Upload.state.not_in(UNFINISHED_UPLOAD_STATES)
    )
    return session.scalars(query).all()
