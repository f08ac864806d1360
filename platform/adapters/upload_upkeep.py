"""Closes abandoned uploads and removes the rows of old closed ones."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, delete, exists, or_, select, tuple_
from sqlalchemy.orm import aliased

from ..servers.models import Server
from ..sessions import PlatformSession, TenantSession
from .models import Upload
from .states import UploadState
from .uploads import get_upload, mark_refused, reopen

UPLOAD_LOST = "upload_lost"
ROWS_AT_ONCE = 1000
"""Few enough that the transaction delays no other."""


def list_lost(session: PlatformSession, since: datetime) -> Sequence[Upload]:
    """The uploads of all tenants whose bytes are all there, with a server not seen since then.

    `since` is of the clock that the servers share. A server that comes back takes its own up again.
    """
    query = (
        select(Upload)
        .outerjoin(Server, Server.id == Upload.server_id)
        .where(
            Upload.state == UploadState.VALIDATING,
            Upload.updated_at < since,
            or_(Server.id.is_(None), Server.seen_at < since),
        )
    )
    return session.scalars(query.order_by(Upload.created_at)).all()


def mark_lost(session: TenantSession, upload_id: str) -> bool:
    """Reject an upload whose server is gone with the bytes; False if it has ended meanwhile.

    If that server comes back, it finds the upload closed. If the bytes are in the store, nothing is
    lost: the upload waits for a commit, which any server takes. Raises UploadNotFound.
    """
    upload = get_upload(session, upload_id)
    if upload.state is not UploadState.VALIDATING:
        return False
    if upload.is_in_store:
        reopen(session, upload_id, server_id=upload.server_id)
        return False
    message = "The server with the bytes is gone. Push the adapter again, to another server."
    mark_refused(session, upload_id, reason=UPLOAD_LOST, message=message)
    return True


def purge(session: PlatformSession, before: datetime) -> int:
    """Forget some of the uploads that were closed before this moment; how many.

    What a version came from stays: the first upload of each file and configuration.
    """
    closed = (
        select(Upload.id)
        .where(
            Upload.updated_at < before,
            or_(
                Upload.state.in_((UploadState.REJECTED, UploadState.ABANDONED)),
                _is_of_a_repeated_push(),
            ),
        )
        .limit(ROWS_AT_ONCE)
    )
    forgotten = session.execute(
        delete(Upload).where(Upload.id.in_(closed.scalar_subquery())).returning(Upload.id)
    )
    return len(forgotten.all())


def _is_of_a_repeated_push() -> ColumnElement[bool]:
    first = aliased(Upload)
    return exists().where(
        first.tenant_id == Upload.tenant_id,
        first.version_id == Upload.version_id,
        first.sha256 == Upload.sha256,
        first.config_json == Upload.config_json,
        tuple_(first.created_at, first.id) < tuple_(Upload.created_at, Upload.id),
    )
