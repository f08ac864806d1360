"""Queries on the audit log."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Row, Select, String, and_, cast, false, func, or_, select

from ..sessions import PlatformSession, TenantSession
from .models import AuditEntry, AuditHead, PlatformAuditEntry, PlatformAuditHead

Entry = TypeVar("Entry", AuditEntry, PlatformAuditEntry)

PLATFORM_CHAIN = "platform"
"""What the platform's own chain is called where a tenant's has its id."""
ROWS_AT_ONCE = 1000
ADAPTER_NOUNS = ("adapter", "version", "alias")
"""Of actions whose resource is an adapter's name, or begins with it and `@`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which entries are wanted: those that fit everything that is not None."""

    action: str | None = None
    """A whole one, such as `key.revoke`, or its noun alone for all of that noun."""
    actor: str | None = None
    """An id, a name, or both kind and id as `kind:id`."""
    resource: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    """Before this moment."""
    adapters: Collection[str] | None = None
    """Only entries about these adapters: all that a key restricted to them may see."""


def list_entries(
    session: TenantSession,
    wanted: AuditFilter,
    *,
    after: int | None,
    limit: int,
    oldest_first: bool = False,
) -> Sequence[AuditEntry]:
    """The tenant's entries, newest first; those after the number `after` in that order."""
    query = _narrow(select(AuditEntry), AuditEntry, wanted)
    return session.scalars(_page(query, AuditEntry, after, limit, oldest_first)).all()


def list_platform_entries(
    session: PlatformSession,
    wanted: AuditFilter,
    *,
    after: int | None,
    limit: int,
    oldest_first: bool = False,
) -> Sequence[PlatformAuditEntry]:
    """Like `list_entries`, of the platform's own chain."""
    query = _narrow(select(PlatformAuditEntry), PlatformAuditEntry, wanted)
    return session.scalars(_page(query, PlatformAuditEntry, after, limit, oldest_first)).all()


def list_audited_requests(session: PlatformSession, request_ids: Collection[str]) -> set[str]:
    """Those of the requests that changed something, in any chain."""
    return {
        request_id
        for entry in (AuditEntry, PlatformAuditEntry)
        for request_id in session.scalars(
            select(entry.request_id).where(entry.request_id.in_(request_ids))
        )
        if request_id is not None
    }


class ChainEnd(NamedTuple):
    """Where a chain ends, by its entries and by its head, at one moment."""

    last_number: int | None
    head_number: int | None
    head_hash: bytes | None


def find_end(session: PlatformSession, chain: str) -> ChainEnd:
    """Where the chain ends; all None if nothing was ever written to it."""
    if chain == PLATFORM_CHAIN:
        last = select(func.max(PlatformAuditEntry.number))
        number, digest = select(PlatformAuditHead.number), select(PlatformAuditHead.hash)
    else:
        last = select(func.max(AuditEntry.number)).where(AuditEntry.tenant_id == chain)
        number = select(AuditHead.number).where(AuditHead.tenant_id == chain)
        digest = select(AuditHead.hash).where(AuditHead.tenant_id == chain)
    parts = (last.scalar_subquery(), number.scalar_subquery(), digest.scalar_subquery())
    return ChainEnd(*session.execute(select(*parts)).one())


def read_chain(
    session: PlatformSession, chain: str, *, first: int, last: int
) -> Iterator[Row[Any]]:
    """The columns of the entries with the numbers `first` to `last`, in order."""
    entry = PlatformAuditEntry if chain == PLATFORM_CHAIN else AuditEntry
    query = select(*entry.__table__.columns).order_by(entry.number)
    if chain != PLATFORM_CHAIN:
        query = query.where(AuditEntry.tenant_id == chain)
    for begin in range(first, last + 1, ROWS_AT_ONCE):
        end = min(begin + ROWS_AT_ONCE - 1, last)
        yield from session.execute(query.where(entry.number.between(begin, end))).all()


def _narrow(query: Select[Entry], entry: type[Entry], wanted: AuditFilter) -> Select[Entry]:
    conditions = []
    if wanted.action is not None:
        is_noun = "." not in wanted.action
        conditions.append(
            entry.action.startswith(f"{wanted.action}.", autoescape=True)
            if is_noun
            else entry.action == wanted.action
        )
    if wanted.actor is not None:
        kind, _, actor_id = wanted.actor.rpartition(":")
        by_id = entry.actor_id == actor_id
        conditions.append(
            and_(by_id, cast(entry.actor_kind, String) == kind)
            if kind
            else or_(by_id, entry.actor_name == actor_id)
        )
    if wanted.resource is not None:
        conditions.append(entry.resource == wanted.resource)
    if wanted.since is not None:
        conditions.append(entry.at >= wanted.since)
    if wanted.until is not None:
        conditions.append(entry.at < wanted.until)
    if wanted.adapters is not None:
        conditions.append(_concerns(entry, wanted.adapters))
    return query.where(*conditions)


def _concerns(entry: type[Entry], adapters: Collection[str]) -> ColumnElement[bool]:
    is_adapters = or_(*(entry.action.startswith(f"{noun}.") for noun in ADAPTER_NOUNS))
    named = (
        or_(entry.resource == name, entry.resource.startswith(f"{name}@", autoescape=True))
        for name in sorted(adapters)
    )
    return and_(is_adapters, or_(false(), *named))


def _page(
    query: Select[Entry], entry: type[Entry], after: int | None, limit: int, oldest_first: bool
) -> Select[Entry]:
    if after is not None:
        query = query.where(entry.number > after if oldest_first else entry.number < after)
    order = entry.number if oldest_first else entry.number.desc()
    return query.order_by(order).limit(limit)
