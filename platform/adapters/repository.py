"""Queries on the catalog. Each sees the session's tenant only, unless its name says otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, delete, func, or_, select
from sqlalchemy.orm import contains_eager, joinedload, selectinload

from ...adapters.identity import AdapterKey
from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from .history import AliasChange, DeletionReceipt, VersionTransition
from .models import Adapter, AdapterAlias, AdapterVersion, AdapterWish, Upload
from .shadow_models import AliasShadow
from .states import (
    LIVE_STATES,
    UNFINISHED_STATES,
    UNFINISHED_UPLOAD_STATES,
    VISIBLE_STATES,
    UploadState,
    VersionState,
    WishKind,
)


def lock_catalog(session: TenantSession) -> bool:
    """Block the tenant's other catalog writers until this unit of work ends.

    False if the tenant does not exist. SQLite's writers wait for each other anyway.
    """
    # NO KEY UPDATE: rows that merely refer to the tenant (usage) can still be added meanwhile.
    lock = select(Tenant.id).with_for_update(key_share=True)
    return session.scalars(lock).one_or_none() is not None


# --- adapters -----------------------------------------------------------------------------------


def find_adapter(session: TenantSession, name: str) -> Adapter | None:
    """The adapter of this name, whether or not anything of it is left."""
    query = select(Adapter).where(Adapter.name == name)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def find_adapter_of(session: TenantSession, version: AdapterVersion) -> Adapter:
    """The adapter of this version, as the database has it now."""
    query = select(Adapter).where(Adapter.id == version.adapter_id)
    return session.scalars(query.execution_options(populate_existing=True)).one()


def find_visible_adapter(session: TenantSession, name: str) -> Adapter | None:
    """The adapter of this name with its visible versions and its aliases."""
    return session.scalars(_visible_adapters().where(Adapter.name == name)).one_or_none()


def list_callable_adapters(
    session: TenantSession, base_id: str, *, names: Collection[str] | None = None
) -> Sequence[Adapter]:
    """The adapters with a ready version for this base, by name; their own rows only.

    Where `names` are given, of these.
    """
    is_callable = (AdapterVersion.state == VersionState.READY) & (AdapterVersion.base_id == base_id)
    query = select(Adapter).where(Adapter.is_visible.is_(True), Adapter.versions.any(is_callable))
    if names is not None:
        query = query.where(Adapter.name.in_(names))
    return session.scalars(query.order_by(Adapter.name)).all()


def list_classifier_ids(session: TenantSession, base_id: str) -> set[str]:
    """The adapters whose newest ready version for this base is a classifier."""
    labels = AdapterVersion.intake_report[("classification", "labels")].as_string()
    query = (
        select(AdapterVersion.adapter_id, labels.is_not(None))
        .where(AdapterVersion.state == VersionState.READY, AdapterVersion.base_id == base_id)
        .order_by(AdapterVersion.number)
    )
    newest: dict[str, bool] = dict(session.execute(query).all())
    return {adapter_id for adapter_id, is_classifier in newest.items() if is_classifier}


def _visible_adapters() -> Select[Adapter]:
    return (
        select(Adapter)
        .where(Adapter.is_visible.is_(True))
        .options(
            selectinload(Adapter.versions.and_(AdapterVersion.state.in_(VISIBLE_STATES))),
            selectinload(Adapter.aliases).options(
                joinedload(AdapterAlias.version), joinedload(AdapterAlias.canary_version)
            ),
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
    """The version that `latest` refers to."""
    query = _visible_versions(adapter_id).where(AdapterVersion.state == VersionState.READY)
    return session.scalars(query.limit(1)).one_or_none()


def find_newest_version(session: TenantSession, adapter_id: str) -> AdapterVersion | None:
    """The adapter's newest version that is not deleted."""
    return session.scalars(_visible_versions(adapter_id).limit(1)).one_or_none()


def find_version_by_number(
    session: TenantSession, adapter_id: str, number: int
) -> AdapterVersion | None:
    """The adapter's version of this number, in any state."""
    query = select(AdapterVersion).where(
        AdapterVersion.adapter_id == adapter_id, AdapterVersion.number == number
    )
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def has_visible_version(session: TenantSession, adapter_id: str) -> bool:
    """Something of the adapter is not deleted."""
    query = select(AdapterVersion.id).where(
        AdapterVersion.adapter_id == adapter_id, AdapterVersion.state.in_(VISIBLE_STATES)
    )
    return session.scalars(query.limit(1)).first() is not None


def list_versions_by_digest_prefix(
    session: TenantSession, adapter_id: str, prefix: str
) -> Sequence[AdapterVersion]:
    """The adapter's versions with this digest prefix, newest first, without deleted ones."""
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
    """A version with this content that is not deleted; it names the object."""
    query = select(AdapterVersion).where(
        AdapterVersion.digest == digest, AdapterVersion.state.in_(VISIBLE_STATES)
    )
    return session.scalars(query.limit(1)).first()


def list_versions_of_content(session: TenantSession, digest: str) -> Sequence[AdapterVersion]:
    """The tenant's versions with this content that are not deleted."""
    query = select(AdapterVersion).where(
        AdapterVersion.digest == digest, AdapterVersion.state.in_(VISIBLE_STATES)
    )
    return session.scalars(query.order_by(AdapterVersion.id)).all()


def last_version_number(session: TenantSession, adapter_id: str) -> int:
    """The highest number that was ever given; 0 before the first."""
    query = select(func.max(AdapterVersion.number)).where(AdapterVersion.adapter_id == adapter_id)
    return session.scalar(query) or 0


def list_unfinished_versions_of_all_tenants(session: PlatformSession) -> Sequence[AdapterVersion]:
    """The versions whose work must be continued after a server start."""
    query = select(AdapterVersion).where(AdapterVersion.state.in_(UNFINISHED_STATES))
    return session.scalars(query.order_by(AdapterVersion.created_at)).all()


def list_stored_contents_of_all_tenants(session: PlatformSession) -> set[AdapterKey]:
    """The contents that some version still needs, or whose removal is not finished."""
    query = (
        select(AdapterVersion.tenant_id, AdapterVersion.digest)
        .where(AdapterVersion.state != VersionState.DELETED)
        .distinct()
    )
    return {AdapterKey(tenant_id, digest) for tenant_id, digest in session.execute(query)}


# --- aliases ------------------------------------------------------------------------------------


def find_alias(session: TenantSession, adapter_id: str, name: str) -> AdapterAlias | None:
    """The adapter's alias of this name with its versions, all as of the same moment."""
    query = (
        select(AdapterAlias)
        .where(AdapterAlias.adapter_id == adapter_id, AdapterAlias.name == name)
        .options(joinedload(AdapterAlias.version), joinedload(AdapterAlias.canary_version))
    )
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


def list_alias_names(session: TenantSession, version: AdapterVersion) -> Sequence[str]:
    """The names of the aliases that point at this version, if only as their canary or shadow."""
    points_at = or_(
        AdapterAlias.version_id == version.id, AdapterAlias.canary_version_id == version.id
    )
    query = select(AdapterAlias.name).where(
        AdapterAlias.adapter_id == version.adapter_id, points_at
    )
    shadowed = select(AliasShadow.alias).where(
        AliasShadow.adapter_id == version.adapter_id, AliasShadow.version_number == version.number
    )
    return sorted({*session.scalars(query), *session.scalars(shadowed)})


# --- history ------------------------------------------------------------------------------------


def find_last_change(session: TenantSession, adapter_id: str, alias: str) -> AliasChange | None:
    """How the alias came to what it points at, or to nothing."""
    return session.scalars(_changes(adapter_id, alias).limit(1)).one_or_none()


def find_change(
    session: TenantSession, adapter_id: str, alias: str, number: int
) -> AliasChange | None:
    """The change of this number among those of the alias."""
    query = _changes(adapter_id, alias).where(AliasChange.number == number)
    return session.scalars(query).one_or_none()


def list_alias_changes(
    session: TenantSession, adapter_id: str, alias: str, *, limit: int
) -> Sequence[AliasChange]:
    """The newest changes of the alias, the newest first."""
    return session.scalars(_changes(adapter_id, alias).limit(limit)).all()


def _changes(adapter_id: str, alias: str) -> Select[AliasChange]:
    return (
        select(AliasChange)
        .where(AliasChange.adapter_id == adapter_id, AliasChange.alias == alias)
        .order_by(AliasChange.number.desc())
    )


def last_transition_number(session: TenantSession, version_id: str) -> int:
    """How many states the version has come to; 0 for one that is being made."""
    query = select(func.max(VersionTransition.number)).where(
        VersionTransition.version_id == version_id
    )
    return session.scalar(query) or 0


def list_transitions(session: TenantSession, version_id: str) -> Sequence[VersionTransition]:
    """The states that the version came to, in order."""
    query = select(VersionTransition).where(VersionTransition.version_id == version_id)
    return session.scalars(query.order_by(VersionTransition.number)).all()


def list_receipts(session: TenantSession, adapter_id: str) -> Sequence[DeletionReceipt]:
    """The receipts of the adapter's deleted versions, the oldest version first."""
    query = select(DeletionReceipt).where(DeletionReceipt.adapter_id == adapter_id)
    return session.scalars(query.order_by(DeletionReceipt.version_number)).all()


# --- wishes -------------------------------------------------------------------------------------


def find_wish(session: TenantSession, version_id: str, kind: WishKind) -> AdapterWish | None:
    """The wish of this kind for this version, live or expired, locked until the work ends."""
    query = _locked_wishes(version_id).where(AdapterWish.kind == kind)
    return session.scalars(query).one_or_none()


def list_wishes_for_version(session: TenantSession, version_id: str) -> Sequence[AdapterWish]:
    """Every wish for this version, live or expired, locked until the work ends."""
    return session.scalars(_locked_wishes(version_id)).all()


def _locked_wishes(version_id: str) -> Select[AdapterWish]:
    # Expired ones may be removed at any moment, without the lock on the catalog.
    query = select(AdapterWish).where(AdapterWish.version_id == version_id).with_for_update()
    return query.execution_options(populate_existing=True)


def list_live_wishes(
    session: TenantSession, adapter_id: str, now: datetime
) -> Sequence[AdapterWish]:
    """The live wishes for the adapter's versions, with these, by number and kind."""
    query = (
        _live_wishes(now)
        .where(AdapterWish.adapter_id == adapter_id)
        .order_by(AdapterVersion.number, AdapterWish.kind)
    )
    return session.scalars(query).all()


def list_live_wishes_of_all_tenants(
    session: PlatformSession, now: datetime, *, base_id: str | None = None
) -> Sequence[AdapterWish]:
    """Every tenant's live wishes, for versions of this base model, the oldest first."""
    query = _live_wishes(now)
    if base_id is not None:
        query = query.where(AdapterVersion.base_id == base_id)
    ordered = query.order_by(AdapterWish.created_at, AdapterWish.version_id, AdapterWish.kind)
    return session.scalars(ordered).all()


def count_other_pins(session: TenantSession, version_id: str, now: datetime) -> int:
    """How many versions but this one the tenant has pinned."""
    query = (
        select(func.count())
        .select_from(AdapterWish)
        .where(
            AdapterWish.kind == WishKind.PIN,
            AdapterWish.version_id != version_id,
            _is_live(now),
        )
    )
    return session.scalar(query) or 0


def delete_expired_wishes_of_all_tenants(session: PlatformSession, now: datetime) -> int:
    """Delete expired wishes; returns how many."""
    expired = session.execute(
        delete(AdapterWish).where(AdapterWish.expires_at <= now).returning(AdapterWish.version_id)
    )
    return len(expired.all())


def _live_wishes(now: datetime) -> Select[AdapterWish]:
    version = AdapterWish.version
    return select(AdapterWish).join(version).where(_is_live(now)).options(contains_eager(version))


def _is_live(now: datetime) -> ColumnElement[bool]:
    return or_(AdapterWish.expires_at.is_(None), AdapterWish.expires_at > now)


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
) -> AdapterVersion | None:
    """The adapter's live version that such an upload became."""
    query = (
        select(AdapterVersion)
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


def list_unfinished_uploads(session: TenantSession) -> Sequence[Upload]:
    """The tenant's uploads that still receive or are being read, the oldest first."""
    query = select(Upload).where(Upload.state.in_(UNFINISHED_UPLOAD_STATES))
    return session.scalars(query.order_by(Upload.created_at, Upload.id)).all()


def list_unfinished_uploads_of_all_tenants(session: PlatformSession) -> Sequence[Upload]:
    """The uploads that still receive or are being read, the oldest first."""
    query = select(Upload).where(Upload.state.in_(UNFINISHED_UPLOAD_STATES))
    return session.scalars(query.order_by(Upload.created_at)).all()


def list_stale_uploads_of_all_tenants(
    session: PlatformSession, older_than: datetime
) -> Sequence[Upload]:
    """The uploads that received nothing since this moment, the oldest first."""
    query = (
        select(Upload)
        .where(Upload.state == UploadState.RECEIVING, Upload.updated_at < older_than)
        .order_by(Upload.updated_at)
    )
    return session.scalars(query).all()


class LiveContent(NamedTuple):
    """What a content is called by one of its versions."""

    key: AdapterKey
    adapter_name: str
    number: int


def list_live_contents(session: TenantSession | PlatformSession) -> list[LiveContent]:
    """Every live version by its content, by name and number: of the tenant, or of all."""
    query = (
        select(AdapterVersion.tenant_id, AdapterVersion.digest, Adapter.name, AdapterVersion.number)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(AdapterVersion.state.in_(LIVE_STATES))
        .order_by(Adapter.name, AdapterVersion.number)
    )
    return [
        LiveContent(AdapterKey(tenant_id, digest), name, number)
        for tenant_id, digest, name, number in session.execute(query)
    ]


def names_of(
    session: PlatformSession, contents: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[str]]:
    """By (tenant id, digest): the live versions of that content, as `name@number`."""
    digests = {digest for _, digest in contents}
    query = (
        select(AdapterVersion.tenant_id, AdapterVersion.digest, Adapter.name, AdapterVersion.number)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(AdapterVersion.digest.in_(digests), AdapterVersion.state.in_(LIVE_STATES))
        .order_by(Adapter.name, AdapterVersion.number)
    )
    names: dict[tuple[str, str], list[str]] = {}
    for tenant_id, digest, name, number in session.execute(query):
        names.setdefault((tenant_id, digest), []).append(f"{name}@{number}")
    return names
