"""Queries on the catalog. Each sees the session's tenant only, unless its name says otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Select, func, select
from sqlalchemy.orm import joinedload, selectinload

from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from .models import Adapter, AdapterAlias, AdapterVersion, Upload
from .states import LIVE_STATES, UNFINISHED_STATES, VISIBLE_STATES, UploadState, VersionState


def lock_catalog(session: TenantSession) -> bool:
    """Make the tenant's other catalog writers wait until this unit of work ends.

    False if there is no such tenant. SQLite's writers wait for each other anyway.
    """
    # NO KEY UPDATE: rows that merely refer to the tenant (usage) can still be added meanwhile.
    lock = select(Tenant.id).with_for_update(key_share=True)
    return session.scalars(lock).one_or_none() is not None


# --- adapters -----------------------------------------------------------------------------------


def find_adapter(session: TenantSession, name: str) -> Adapter | None:
    """The adapter of this name, whether or not anything of it is left."""
    return session.scalars(select(Adapter).where(Adapter.name == name)).one_or_none()


def find_visible_adapter(session: TenantSession, name: str) -> Adapter | None:
    """The adapter of this name with its visible versions and its aliases."""
    return session.scalars(_visible_adapters().where(Adapter.name == name)).one_or_none()


def list_visible_adapters(session: TenantSession) -> Sequence[Adapter]:
    """The adapters of which something is visible, by name, with versions and aliases."""
    return session.scalars(_visible_adapters().order_by(Adapter.name)).all()


def _visible_adapters() -> Select[Adapter]:
    is_visible = AdapterVersion.state.in_(VISIBLE_STATES)
    return (
        select(Adapter)
        .where(Adapter.versions.any(is_visible))
        .options(
            selectinload(Adapter.versions.and_(is_visible)),
            selectinload(Adapter.aliases).joinedload(AdapterAlias.version),
        )
        .execution_options(populate_existing=True)
    )


# --- versions -----------------------------------------------------------------------------------


def find_version(session: TenantSession, version_id: str) -> AdapterVersion | None:
    """The version of this id, in any state, as the database has it now."""
    query = select(AdapterVersion).where(AdapterVersion.id == version_id)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def find_visible_version(
    session: TenantSession, adapter_id: str, number: int
) -> AdapterVersion | None:
    """The adapter's version of this number, unless it is deleted."""
    query = _visible_versions(adapter_id).where(AdapterVersion.number == number)
    return session.scalars(query).one_or_none()


def find_newest_ready_version(session: TenantSession, adapter_id: str) -> AdapterVersion | None:
    """What `latest` means."""
    query = _visible_versions(adapter_id).where(AdapterVersion.state == VersionState.READY)
    return session.scalars(query.limit(1)).one_or_none()


def find_newest_version(session: TenantSession, adapter_id: str) -> AdapterVersion | None:
    """The adapter's newest version that is not deleted."""
    return session.scalars(_visible_versions(adapter_id).limit(1)).one_or_none()


def find_aliased_version(
    session: TenantSession, adapter_id: str, alias: str
) -> AdapterVersion | None:
    """The version that the alias points at, unless it is deleted."""
    query = _visible_versions(adapter_id).join(
        AdapterAlias, AdapterAlias.version_id == AdapterVersion.id
    )
    return session.scalars(query.where(AdapterAlias.name == alias)).one_or_none()


def list_versions_by_digest_prefix(
    session: TenantSession, adapter_id: str, prefix: str
) -> Sequence[AdapterVersion]:
    """The adapter's versions whose digest begins so, the newest first, without deleted ones."""
    query = _visible_versions(adapter_id).where(
        AdapterVersion.digest.startswith(prefix, autoescape=True)
    )
    return session.scalars(query).all()


def _visible_versions(adapter_id: str) -> Select[AdapterVersion]:
    return (
        select(AdapterVersion)
        .where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.state.in_(VISIBLE_STATES))
        .order_by(AdapterVersion.number.desc())
    )


def find_same_content(
    session: TenantSession, adapter_id: str, digest: str
) -> AdapterVersion | None:
    """The adapter's version of this content that another push of it would repeat."""
    query = select(AdapterVersion).where(
        AdapterVersion.adapter_id == adapter_id,
        AdapterVersion.digest == digest,
        AdapterVersion.state.in_(LIVE_STATES),
    )
    return session.scalars(query).one_or_none()


def has_version(session: TenantSession, digest: str, states: Collection[VersionState]) -> bool:
    """Some adapter of the tenant has a version of this content in one of these states."""
    condition = (
        select(AdapterVersion.id)
        .where(AdapterVersion.digest == digest, AdapterVersion.state.in_(states))
        .limit(1)
    )
    return session.scalars(condition).first() is not None


def find_content(session: TenantSession, digest: str) -> AdapterVersion | None:
    """A version with this content that is not deleted: says which object holds it."""
    query = select(AdapterVersion).where(
        AdapterVersion.digest == digest, AdapterVersion.state.in_(VISIBLE_STATES)
    )
    return session.scalars(query.limit(1)).first()


def last_version_number(session: TenantSession, adapter_id: str) -> int:
    """The highest number that was ever given; 0 before the first."""
    query = select(func.max(AdapterVersion.number)).where(AdapterVersion.adapter_id == adapter_id)
    return session.scalar(query) or 0


def list_unfinished_versions_of_all_tenants(session: PlatformSession) -> Sequence[AdapterVersion]:
    """The versions that somebody must carry on: after a start, whoever starts."""
    query = select(AdapterVersion).where(AdapterVersion.state.in_(UNFINISHED_STATES))
    return session.scalars(query.order_by(AdapterVersion.created_at)).all()


# --- aliases ------------------------------------------------------------------------------------


def find_alias(session: TenantSession, adapter_id: str, name: str) -> AdapterAlias | None:
    """The adapter's alias of this name."""
    query = select(AdapterAlias).where(
        AdapterAlias.adapter_id == adapter_id, AdapterAlias.name == name
    )
    return session.scalars(query.options(joinedload(AdapterAlias.version))).one_or_none()


def list_alias_names(session: TenantSession, version_id: str) -> Sequence[str]:
    """The names of the aliases that point at this version."""
    query = select(AdapterAlias.name).where(AdapterAlias.version_id == version_id)
    return session.scalars(query.order_by(AdapterAlias.name)).all()


# --- uploads ------------------------------------------------------------------------------------


def find_upload(session: TenantSession, upload_id: str) -> Upload | None:
    """The upload of this id, locked against other writers until this unit of work ends."""
    query = select(Upload).where(Upload.id == upload_id).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def list_receiving_uploads(session: TenantSession, sha256: str) -> Sequence[Upload]:
    """The uploads that wait for the rest of this weights file, the newest first."""
    query = select(Upload).where(Upload.sha256 == sha256, Upload.state == UploadState.RECEIVING)
    return session.scalars(query.order_by(Upload.created_at.desc())).all()


def find_live_version_of_upload(
    session: TenantSession, adapter_name: str, *, sha256: str, config_json: str, base_id: str
) -> str | None:
    """The id of the adapter's live version that such an upload became."""
    query = (
        select(AdapterVersion.id)
        .join(Upload, Upload.version_id == AdapterVersion.id)
        .where(
            Upload.sha256 == sha256,
            Upload.config_json == config_json,
            Upload.adapter_name == adapter_name,
            AdapterVersion.state.in_(LIVE_STATES),
            AdapterVersion.base_id == base_id,
        )
        .limit(1)
    )
    return session.scalars(query).first()


def list_uploads_of_version(session: TenantSession, version_id: str) -> Sequence[Upload]:
    """The uploads that became this version, the oldest first."""
    query = select(Upload).where(Upload.version_id == version_id)
    return session.scalars(query.order_by(Upload.created_at)).all()


def list_unfinished_uploads_of_all_tenants(session: PlatformSession) -> Sequence[Upload]:
    """The uploads that still receive or are being read, the oldest first."""
    query = select(Upload).where(Upload.state.in_((UploadState.RECEIVING, UploadState.VALIDATING)))
    return session.scalars(query.order_by(Upload.created_at)).all()
