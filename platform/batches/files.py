"""Adds, finds, lists and removes tenants' files.

A key that is restricted to adapters sees the files of its own only: those of others may hold
answers of adapters that it may not use.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, Select, func, select, tuple_

from ..base import utc_now
from ..errors import FileInUse, FileNotFound, QuotaExceeded
from ..keys.principal import Principal, Scope
from ..quotas.repository import lock_tenant
from ..sessions import PlatformSession, TenantSession
from .file_models import FilePurpose, StoredFile
from .models import Batch
from .states import OPEN_STATES

MAX_FILES = 1000
"""Of one tenant."""
MAX_TENANT_BYTES = 4 << 30
"""Of all files of one tenant."""


def new_file_id() -> str:
    """The id of an uploaded file."""
    return f"file-{uuid.uuid4().hex}"


def check_room(session: TenantSession, size_bytes: int) -> None:
    """Check that one more file of this size fits. Raises QuotaExceeded."""
    num_files, num_bytes = session.execute(
        select(func.count(StoredFile.id), func.coalesce(func.sum(StoredFile.size_bytes), 0))
    ).one()
    if num_files >= MAX_FILES:
        raise QuotaExceeded("files", limit=MAX_FILES, used=num_files)
    if num_bytes + size_bytes > MAX_TENANT_BYTES:
        raise QuotaExceeded(
            "bytes of files", limit=MAX_TENANT_BYTES, used=num_bytes, wanted=size_bytes
        )


def add_upload(session: TenantSession, file: StoredFile) -> None:
    """Add an uploaded file, whose bytes are in the store. Raises QuotaExceeded."""
    lock_tenant(session)
    check_room(session, file.size_bytes)
    session.add(file)
    session.flush()


def get_file(
    session: TenantSession, file_id: str, *, viewer: Principal | None = None
) -> StoredFile:
    """The tenant's file. Raises FileNotFound, also if it has expired or the viewer may not see
    it."""
    query = _visible(viewer).where(StoredFile.id == file_id, StoredFile.expires_at > utc_now())
    found = session.scalars(query).one_or_none()
    if found is None:
        raise FileNotFound(f"There is no file `{file_id}`.")
    return found


def get_input(session: TenantSession, file_id: str) -> StoredFile:
    """The file that an unfinished batch reads, expired or not. Raises FileNotFound."""
    found = session.scalars(select(StoredFile).where(StoredFile.id == file_id)).one_or_none()
    if found is None:
        raise FileNotFound(f"There is no file `{file_id}`.")
    return found


def list_files(
    session: TenantSession,
    *,
    viewer: Principal,
    purpose: FilePurpose | None = None,
    after: str | None = None,
    limit: int,
    is_descending: bool = True,
) -> Sequence[StoredFile]:
    """At most `limit` files after the file `after`, the newest first if `is_descending`."""
    place = tuple_(StoredFile.created_at, StoredFile.id)
    query = _visible(viewer).where(StoredFile.expires_at > utc_now()).limit(limit)
    if purpose is not None:
        query = query.where(StoredFile.purpose == purpose)
    if after is not None:
        last = select(StoredFile.created_at, StoredFile.id).where(StoredFile.id == after)
        bound = last.scalar_subquery()
        query = query.where(place < bound if is_descending else place > bound)
    columns: tuple[ColumnElement[object], ...] = (StoredFile.created_at, StoredFile.id)  # type: ignore[assignment]
    order = [column.desc() if is_descending else column.asc() for column in columns]
    return session.scalars(query.order_by(*order)).all()


def remove(session: TenantSession, file_id: str, *, viewer: Principal) -> StoredFile:
    """Remove the file's row; the caller then removes its bytes.

    Raises FileNotFound, or FileInUse if a batch that has not ended reads it.
    """
    file = get_file(session, file_id, viewer=viewer)
    uses = select(Batch.id).where(Batch.input_file_id == file_id, Batch.state.in_(OPEN_STATES))
    used_by = session.scalars(uses.limit(1)).first()
    if used_by is not None:
        raise FileInUse(f"The batch `{used_by}` reads this file: cancel it first.")
    session.delete(file)
    session.flush()
    return file


def list_expired_of_all_tenants(session: PlatformSession, now: datetime) -> Sequence[StoredFile]:
    """Expired files that no unfinished batch reads."""
    uses = (
        select(Batch.id)
        .where(Batch.input_file_id == StoredFile.id, Batch.state.in_(OPEN_STATES))
        .exists()
    )
    query = select(StoredFile).where(StoredFile.expires_at <= now, ~uses)
    return session.scalars(query.order_by(StoredFile.expires_at)).all()


def remove_expired(session: TenantSession, file_id: str) -> bool:
    """Remove the row of an expired file; False if it is gone."""
    if not exists(session, file_id):
        return False
    session.delete(get_input(session, file_id))
    return True


def exists(session: TenantSession, file_id: str) -> bool:
    """The tenant has this file, expired or not."""
    query = select(StoredFile.id).where(StoredFile.id == file_id)
    return session.scalars(query).first() is not None


def list_stored_of_all_tenants(session: PlatformSession) -> Sequence[StoredFile]:
    """Every file that has bytes in the store."""
    return session.scalars(select(StoredFile)).all()


def _visible(viewer: Principal | None) -> Select[StoredFile]:
    query = select(StoredFile)
    if viewer is not None and viewer.adapters is not None:
        query = query.where(StoredFile.key_id == viewer.key_id)
    if viewer is not None and not viewer.can(Scope.SAMPLES_READ):
        query = query.where(~StoredFile.has_samples)
    return query
