"""Reports what still depends on each of the server's secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import func, select

from .audit.models import AuditEntry, PlatformAuditEntry
from .database import Database
from .keys import repository as keys
from .operators import repository as operators
from .samples.models import Sample
from .sessions import PlatformSession
from .webhooks.models import WebhookEndpoint


class Needs(NamedTuple):
    """The number of items signed or encrypted with one secret."""

    keys: int
    """Tenants' keys that are not revoked."""
    operator_keys: int
    """Operators' keys that are not revoked."""
    audit_entries: int
    """Of all logs; entries are never signed again."""
    webhooks: int
    """Whose own secrets are encrypted under it; an hourly job encrypts them again."""
    samples: int
    """Encrypted under it; likewise."""


def count_needs(database: Database) -> dict[str, Needs]:
    """By the secret's id."""
    with database.platform_transaction(read_only=True) as session:
        counted = (
            keys.count_by_secret(session),
            operators.count_by_secret(session),
            _count_audit_entries(session),
            _count_rows(session, WebhookEndpoint),
            _count_rows(session, Sample),
        )
    names = sorted({name for counts in counted for name in counts})
    return {name: Needs(*(counts.get(name, 0) for counts in counted)) for name in names}


def _count_audit_entries(session: PlatformSession) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for table in (AuditEntry, PlatformAuditEntry):
        query = select(table.secret_id, func.count()).group_by(table.secret_id)
        for name, number in session.execute(query):
            counts[name] = counts.get(name, 0) + number
    return counts


def _count_rows(
    session: PlatformSession, table: type[WebhookEndpoint | Sample]
) -> Mapping[str, int]:
    query = select(table.secret_id, func.count()).group_by(table.secret_id)
    return dict(session.execute(query).all())
