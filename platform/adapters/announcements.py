"""Announces what happens to versions and aliases to the tenant's webhooks."""

from __future__ import annotations

from sqlalchemy import select

from ..base import JsonObject
from ..sessions import TenantSession
from ..webhooks.event_types import EventType
from ..webhooks.outbox import announce
from .history import AliasChange, DeletionReceipt
from .models import Adapter, AdapterVersion


def announce_ready(session: TenantSession, version: AdapterVersion) -> None:
    """The version may be used."""
    _announce_version(session, EventType.VERSION_READY, version, {})


def announce_rejected(session: TenantSession, version: AdapterVersion) -> None:
    """The version may never be used; with the code of the reason."""
    details = {"reason": version.reason_code}
    _announce_version(session, EventType.VERSION_REJECTED, version, details)


def announce_deleted(
    session: TenantSession, version: AdapterVersion, receipt: DeletionReceipt
) -> None:
    """The version's content is removed; with the receipt."""
    details = {
        "requested_at": receipt.requested_at,
        "finished_at": receipt.finished_at,
        "receipt": receipt.receipt,
    }
    _announce_version(session, EventType.VERSION_DELETED, version, details)


def announce_alias(session: TenantSession, change: AliasChange) -> None:
    """The alias has another target, or none."""
    canary = {"version": change.canary_number, "percent": change.canary_percent}
    data = {
        "adapter": _name_of(session, change.adapter_id),
        "alias": change.alias,
        "action": change.action,
        "version": change.version_number,
        "canary": None if change.canary_number is None else canary,
        "changed_by": change.changed_by,
        "reason": change.reason,
    }
    announce(session, session.tenant_id, EventType.ALIAS_CHANGED, data)
    if change.reason is not None:
        announce(session, session.tenant_id, EventType.ALIAS_ROLLED_BACK, data)


def _announce_version(
    session: TenantSession, event_type: EventType, version: AdapterVersion, details: JsonObject
) -> None:
    data = {
        "adapter": _name_of(session, version.adapter_id),
        "version": version.number,
        "digest": version.digest,
        **details,
    }
    announce(session, session.tenant_id, event_type, data)


def _name_of(session: TenantSession, adapter_id: str) -> str:
    return session.scalars(select(Adapter.name).where(Adapter.id == adapter_id)).one()
