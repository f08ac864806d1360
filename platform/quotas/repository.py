"""Queries on limits and on what they count."""

from __future__ import annotations

from sqlalchemy import Select, func, or_, select

from ..adapters.models import Adapter, AdapterVersion, Upload
from ..adapters.states import VISIBLE_STATES, UploadState, VersionState
from ..base import utc_now
from ..keys.models import ApiKey
from ..sessions import TenantSession
from ..users.models import User
from .models import Quota

_ON_THE_WAY = (UploadState.RECEIVING, UploadState.VALIDATING)


def find_quota(session: TenantSession) -> Quota | None:
    """The tenant's limits."""
    return session.scalars(select(Quota)).one_or_none()


def lock_quota(session: TenantSession) -> Quota | None:
    """The tenant's limits, which nobody else holds until this unit of work ends.

    Whoever takes or gives back something that they limit holds them meanwhile.
    """
    query = select(Quota).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()


# --- what a tenant owns -------------------------------------------------------------------------


def count_adapters(session: TenantSession) -> int:
    """The adapters that have a visible version."""
    return _count(session, select(func.count(Adapter.id)).where(Adapter.is_visible.is_(True)))


def count_versions(session: TenantSession, adapter_name: str) -> int:
    """The visible versions of the adapter of this name; 0 if there is none."""
    query = (
        select(func.count(AdapterVersion.id))
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .where(Adapter.name == adapter_name, AdapterVersion.state.in_(VISIBLE_STATES))
    )
    return _count(session, query)


def most_versions_of_an_adapter(session: TenantSession) -> int:
    """The visible versions of the adapter that has most of them."""
    number = func.count(AdapterVersion.id)
    query = (
        select(number)
        .where(AdapterVersion.state.in_(VISIBLE_STATES))
        .group_by(AdapterVersion.adapter_id)
        .order_by(number.desc())
    )
    return session.scalars(query.limit(1)).first() or 0


def sum_stored_bytes(session: TenantSession) -> int:
    """The bytes of the tenant's distinct contents that are not removed from the store."""
    first_of_content = (
        select(func.min(AdapterVersion.id))
        .where(AdapterVersion.state != VersionState.DELETED)
        .group_by(AdapterVersion.digest)
    )
    query = select(func.coalesce(func.sum(AdapterVersion.size_bytes), 0))
    return int(session.scalar(query.where(AdapterVersion.id.in_(first_of_content))) or 0)


def is_stored(session: TenantSession, digest: str) -> bool:
    """A version with this content is not removed from the store."""
    query = select(AdapterVersion.id).where(
        AdapterVersion.digest == digest, AdapterVersion.state != VersionState.DELETED
    )
    return session.scalars(query.limit(1)).first() is not None


def sum_expected_bytes(session: TenantSession) -> int:
    """The bytes that the tenant's unfinished uploads declare."""
    query = select(func.coalesce(func.sum(Upload.size_bytes), 0))
    return int(session.scalar(query.where(Upload.state.in_(_ON_THE_WAY))) or 0)


def count_usable_keys(session: TenantSession) -> int:
    """The keys that are neither revoked nor expired."""
    is_unexpired = or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > utc_now())
    query = select(func.count(ApiKey.id)).where(ApiKey.revoked_at.is_(None), is_unexpired)
    return _count(session, query)


def count_active_users(session: TenantSession) -> int:
    """The users that are not disabled."""
    return _count(session, select(func.count(User.id)).where(User.disabled_at.is_(None)))


def _count(session: TenantSession, query: Select[int]) -> int:
    return session.scalar(query) or 0
