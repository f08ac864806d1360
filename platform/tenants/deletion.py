"""Deletes tenants: hides them at once, and erases their rows in small steps.

What a tenant has outside of the database is removed before its rows, by the caller. Every step may
be repeated, and the receipt is written with the rows that it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from sqlalchemy import CursorResult, Executable, Table, delete, or_, select, tuple_, update

from ..adapters.models import Adapter, AdapterVersion, Upload
from ..adapters.states import UploadState, VersionState
from ..base import Base, JsonObject, utc_now
from ..errors import TenantDeletionNotFound
from ..sessions import PlatformSession
from ..usage.models import UsageRecord
from ..webhooks.event_types import DeliveryState, EventType
from ..webhooks.models import WebhookDelivery
from ..webhooks.outbox import announce
from .models import Tenant, TenantDeletion
from .service import get_tenant_to_change

LEDGER = frozenset({"usage_records", "usage_days", "prices"})
"""The tables whose rows outlive the tenant, unless the deletion includes the usage."""
ROWS_PER_STEP = 1000
LATE_ROWS = timedelta(days=3)
"""How long after a deletion its rows are looked for again: servers may have recorded requests that
ended late."""


def find_unfinished(session: PlatformSession, slug: str) -> TenantDeletion | None:
    """The deletion of the tenant that had this slug, if it has not finished."""
    query = select(TenantDeletion).where(
        TenantDeletion.slug == slug, TenantDeletion.finished_at.is_(None)
    )
    return session.scalars(query).one_or_none()


def begin(session: PlatformSession, slug: str, *, with_usage: bool) -> TenantDeletion:
    """Hide the tenant: its keys are refused, and its name is not found. Raises TenantNotFound."""
    tenant = get_tenant_to_change(session, slug)
    now = utc_now()
    tenant.deleting_at = now
    tenant.suspended_at = tenant.suspended_at or now
    deletion = TenantDeletion(
        id=tenant.id, slug=slug, with_usage=with_usage, requested_at=now, receipt={}
    )
    session.add(deletion)
    session.flush()
    return deletion


def get(session: PlatformSession, deletion_id: str) -> TenantDeletion:
    """The deletion of the tenant that had this id. Raises TenantDeletionNotFound."""
    found = session.get(TenantDeletion, deletion_id)
    if found is None:
        raise TenantDeletionNotFound(f"There is no deletion {deletion_id!r} of a tenant.")
    return found


def list_deletions(
    session: PlatformSession, *, after: str | None = None, limit: int | None = None
) -> Sequence[TenantDeletion]:
    """Deletions by id: at most `limit` after this one."""
    query = select(TenantDeletion).order_by(TenantDeletion.id).limit(limit)
    if after is not None:
        query = query.where(TenantDeletion.id > after)
    return session.scalars(query).all()


def list_unfinished(session: PlatformSession) -> Sequence[TenantDeletion]:
    """The deletions that have not finished, the oldest first."""
    query = select(TenantDeletion).where(TenantDeletion.finished_at.is_(None))
    return session.scalars(query.order_by(TenantDeletion.requested_at)).all()


def list_recent(session: PlatformSession) -> Sequence[TenantDeletion]:
    """Finished deletions after which rows may still have been written."""
    since = utc_now() - LATE_ROWS
    return session.scalars(select(TenantDeletion).where(TenantDeletion.finished_at > since)).all()


def list_adapter_names(session: PlatformSession, tenant_id: str, limit: int) -> Sequence[str]:
    """At most `limit` of the tenant's adapters whose deletion has not begun."""
    query = select(Adapter.name).where(Adapter.tenant_id == tenant_id, Adapter.is_visible)
    return session.scalars(query.order_by(Adapter.name).limit(limit)).all()


def has_adapters(session: PlatformSession, tenant_id: str) -> bool:
    """A version is not deleted yet, or an upload may become one."""
    version = select(AdapterVersion.id).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.state != VersionState.DELETED
    )
    upload = select(Upload.id).where(
        Upload.tenant_id == tenant_id,
        Upload.state.in_((UploadState.RECEIVING, UploadState.VALIDATING)),
    )
    return any(session.scalars(each.limit(1)).first() is not None for each in (version, upload))


def note(session: PlatformSession, deletion_id: str, name: str, value: object) -> bool:
    """Add an entry to the receipt, the first time only; returns whether it was."""
    deletion = _lock(session, deletion_id)
    if name in deletion.receipt:
        return False
    deletion.receipt = {**deletion.receipt, name: value}
    return True


def announce_removal(session: PlatformSession, deletion_id: str) -> None:
    """Tell the tenant's webhooks, once, that the adapters and files are removed."""
    if note(session, deletion_id, "announced_at", utc_now().isoformat()):
        deletion = get(session, deletion_id)
        requested_at = deletion.requested_at.isoformat()
        data = {"tenant": deletion.slug, "requested_at": requested_at}
        announce(session, deletion_id, EventType.TENANT_DELETED, data)


def has_pending_events(session: PlatformSession, tenant_id: str) -> bool:
    """The tenant's webhooks have not received everything yet."""
    query = select(WebhookDelivery.id).where(
        WebhookDelivery.tenant_id == tenant_id, WebhookDelivery.state == DeliveryState.PENDING
    )
    return session.scalars(query.limit(1)).first() is not None


def tables_to_erase(*, with_usage: bool) -> list[str]:
    """The tables with rows of tenants, those first that refer to others."""
    tables = reversed(Base.metadata.sorted_tables)
    owned = [table.name for table in tables if "tenant_id" in table.columns]
    return [name for name in owned if with_usage or name not in LEDGER]


def erase_rows(session: PlatformSession, deletion_id: str, table_name: str) -> bool:
    """Delete some of the tenant's rows and count them in the receipt; False if there is none."""
    table = Base.metadata.tables[table_name]
    key = tuple_(*table.primary_key.columns)
    rows = select(*table.primary_key.columns).where(table.c.tenant_id == deletion_id)
    if not _refers_to_itself(table):  # otherwise a step could keep a row that refers to another
        rows = rows.limit(ROWS_PER_STEP)
    num_rows = _num_changed(session, delete(table).where(key.in_(rows)))
    if num_rows:
        _count(_lock(session, deletion_id), table_name, num_rows)
    return num_rows > 0


def forget_callers(session: PlatformSession, deletion_id: str) -> bool:
    """Remove users and keys from some of the ledger's rows that stay; False if none names any."""
    rows = select(UsageRecord.request_id).where(
        UsageRecord.tenant_id == deletion_id,
        or_(UsageRecord.key_id.is_not(None), UsageRecord.user_id.is_not(None)),
    )
    table = UsageRecord.__table__
    change = update(UsageRecord).where(table.c.request_id.in_(rows.limit(ROWS_PER_STEP)))
    return _num_changed(session, change.values(key_id=None, user_id=None)) > 0


def finish(session: PlatformSession, deletion_id: str) -> TenantDeletion:
    """Nothing is left: the name may be used again. May be repeated."""
    deletion = _lock(session, deletion_id)
    if deletion.finished_at is None:
        tenant = session.get_one(Tenant, deletion_id)
        tenant.slug, tenant.name = f"~{tenant.id}", None  # no tenant can have this name
        deletion.finished_at = utc_now()
    return deletion


def _num_changed(session: PlatformSession, statement: Executable) -> int:
    return cast(CursorResult[Any], session.execute(statement)).rowcount


def _lock(session: PlatformSession, deletion_id: str) -> TenantDeletion:
    return session.get_one(
        TenantDeletion, deletion_id, with_for_update=True, populate_existing=True
    )


def _count(deletion: TenantDeletion, table_name: str, num_rows: int) -> None:
    rows: JsonObject = dict(deletion.receipt.get("rows", {}))
    rows[table_name] = rows.get(table_name, 0) + num_rows
    deletion.receipt = {**deletion.receipt, "rows": rows}


def _refers_to_itself(table: Table) -> bool:
    return any(key.referred_table is table for key in table.foreign_key_constraints)
