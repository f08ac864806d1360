"""Uploads in a database, in the state that a test needs."""

from __future__ import annotations

from datetime import datetime

from loraplex.platform.adapters import repository, uploads
from loraplex.platform.adapters.models import Upload
from loraplex.platform.adapters.states import UploadState
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from support.catalog import make_version


def abandon_stale(database: Database, older_than: datetime) -> list[str]:
    """As upkeep does it: the ids of the uploads of all tenants that it gave up."""
    with database.platform_transaction(read_only=True) as platform:
        stale = repository.list_stale_uploads_of_all_tenants(platform, older_than)
    abandoned = []
    for upload in stale:
        with database.transaction(upload.tenant_id) as session:
            if uploads.abandon_if_stale(session, upload.id, older_than):
                abandoned.append(upload.id)
    return abandoned


def make_upload(
    session: TenantSession,
    *,
    size_bytes: int = 10,
    aliases: tuple[str, ...] = (),
    created_by: str | None = None,
) -> Upload:
    """An upload of which nothing has arrived."""
    return uploads.open_upload(
        session,
        uploads.NewUpload(
            adapter_name="support-bot",
            config_json='{"peft_type": "LORA"}',
            size_bytes=size_bytes,
            sha256="ab" * 32,
            server_id="here",
            aliases=aliases,
            created_by=created_by,
        ),
    )


def bring_upload_to(session: TenantSession, upload: Upload, state: UploadState) -> None:
    """Let all bytes arrive and take the upload the ordinary way to a state."""
    if state is UploadState.ABANDONED:
        uploads.abandon_upload(session, upload.id)
        return
    uploads.advance_upload(session, upload.id, offset=0, num_bytes=upload.size_bytes)
    if state is UploadState.RECEIVING:
        return
    uploads.begin_validation(session, upload.id)
    if state is UploadState.ACCEPTED:
        version = make_version(session, content="of the upload")
        uploads.mark_accepted(session, upload.id, version.id)
    if state is UploadState.REJECTED:
        uploads.mark_refused(session, upload.id, reason="digest_mismatch", message="Not it.")
