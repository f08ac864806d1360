"""Lists of adapters, searched, sorted and counted by the database.

A page takes one query for its rows and three for related data, whatever its size.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, Subquery, and_, func, literal, or_, select, tuple_
from sqlalchemy.orm import aliased

from ...adapters.identity import AdapterKey
from ..base import UtcDateTime
from ..errors import InvalidValue
from ..names import is_adapter_name, is_slug
from ..overview.models import AdapterUse
from ..sessions import PlatformSession, TenantSession
from ..tenants.models import Tenant
from .models import Adapter, AdapterAlias, AdapterVersion
from .states import VISIBLE_STATES, VersionState

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class AdapterOrder(StrEnum):
    """The sort orders of a list; ties are sorted by name. Largest values come first."""

    NAME = "name"
    NAME_DOWN = "-name"
    CREATED = "created"
    LAST_USED = "last_used"
    REQUESTS = "requests"
    BYTES = "bytes"
    P95 = "p95"


class AdapterQuery(NamedTuple):
    """Which adapters are wanted, and in which order."""

    search: str | None = None
    """A part of the name."""
    order: AdapterOrder = AdapterOrder.NAME
    state: VersionState | None = None
    """The state of the latest version."""
    tenant_slug: str | None = None
    names: Collection[str] | None = None
    """The names that the caller may see; None: all."""


class AdapterSummary(NamedTuple):
    """One adapter with the data shown in lists."""

    adapter: Adapter
    tenant_slug: str
    latest: AdapterVersion
    num_versions: int
    num_bytes: int
    num_requests: int
    """Of the last days."""
    last_used_at: datetime | None
    p95_ms: float | None
    aliases: dict[str, int]
    canaries: dict[str, tuple[int, float]]
    """Of the split aliases: the version that gets a part of the requests, and the percentage."""
    contents: list[AdapterKey]
    """The contents of its versions."""
    cursor: str
    """Names its place in this list."""


def list_summaries(
    session: TenantSession | PlatformSession,
    query: AdapterQuery,
    *,
    after: str | None = None,
    limit: int,
) -> list[AdapterSummary]:
    """At most `limit` visible adapters after the cursor `after`.

    Of the session's tenant, or of all. Raises InvalidValue for a cursor of another list.
    """
    listing = _Listing(query)
    rows = session.execute(listing.select(after).limit(limit)).all()
    ids = [row[0].id for row in rows]
    versions, targets = _versions_of(session, ids), _aliases(session, ids)
    uses = _uses_of(session, rows)
    return [
        AdapterSummary(
            adapter=adapter,
            tenant_slug=slug,
            latest=versions[adapter.id][-1],
            num_versions=len(versions[adapter.id]),
            num_bytes=sum(version.size_bytes for version in versions[adapter.id]),
            num_requests=use.num_requests if use else 0,
            last_used_at=use.last_used_at if use else None,
            p95_ms=use.p95_ms if use else None,
            aliases={target.alias: target.number for target in targets[adapter.id]},
            canaries={
                target.alias: (target.canary, target.percent)
                for target in targets[adapter.id]
                if target.canary is not None and target.percent is not None
            },
            contents=[AdapterKey(v.tenant_id, v.digest) for v in versions[adapter.id]],
            cursor=listing.cursor(key, adapter, slug),
        )
        for adapter, slug, key in rows
        for use in [uses.get((adapter.tenant_id, adapter.name))]
    ]


class _Listing:
    """The query for a page's rows, and a row's cursor in its order.

    It joins only what the order or a condition needs; the rest is queried for the page only.
    """

    def __init__(self, query: AdapterQuery) -> None:
        self._query = query
        self._order = query.order
        self._versions = _sums_of_versions()
        self._key = self._sorted_by()

    def select(self, after: str | None) -> Select[*tuple[Any, ...]]:
        selected = (
            select(Adapter, Tenant.slug, self._key.label("sort_key"))
            .select_from(Adapter)
            .join(Tenant, Tenant.id == Adapter.tenant_id)
            .where(*_conditions(self._query))
        )
        selected = self._join(selected)
        if after is not None:
            selected = selected.where(self._is_behind(after))
        return selected.order_by(*self._ordering())

    def _join(self, selected: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
        versions = self._versions.c
        if self._order in (AdapterOrder.LAST_USED, AdapterOrder.REQUESTS, AdapterOrder.P95):
            selected = selected.outerjoin(
                AdapterUse,
                (AdapterUse.tenant_id == Adapter.tenant_id)
                & (AdapterUse.adapter_name == Adapter.name),
            )
        if self._order is AdapterOrder.BYTES or self._query.state is not None:
            selected = selected.join(self._versions, versions.adapter_id == Adapter.id)
        if self._query.state is not None:
            selected = selected.join(
                AdapterVersion,
                (AdapterVersion.tenant_id == Adapter.tenant_id)
                & (AdapterVersion.adapter_id == Adapter.id)
                & (AdapterVersion.number == versions.latest_number),
            )
        return selected

    def cursor(self, key: Any, adapter: Adapter, slug: str) -> str:
        # Sums are decimals on PostgreSQL.
        place = key.isoformat() if isinstance(key, datetime) else float(key)
        text = json.dumps([self._order, place, adapter.name, slug])
        return base64.urlsafe_b64encode(text.encode()).decode()

    def _sorted_by(self) -> ColumnElement[Any]:
        """The primary sort key; ties are sorted by name."""
        match self._order:
            case AdapterOrder.CREATED:
                return Adapter.created_at.expression
            case AdapterOrder.LAST_USED:
                never = literal(_NEVER, UtcDateTime)
                return func.coalesce(AdapterUse.last_used_at, never, type_=UtcDateTime)
            case AdapterOrder.REQUESTS:
                return func.coalesce(AdapterUse.num_requests, 0)
            case AdapterOrder.BYTES:
                return self._versions.c.num_bytes
            case AdapterOrder.P95:
                return func.coalesce(AdapterUse.p95_ms, -1.0)
        return literal(0)

    def _ordering(self) -> list[ColumnElement[Any]]:
        if self._order is AdapterOrder.NAME:
            return [Adapter.name.asc(), Tenant.slug.asc()]
        if self._order is AdapterOrder.NAME_DOWN:
            return [Adapter.name.desc(), Tenant.slug.desc()]
        return [self._key.desc(), Adapter.name.asc(), Tenant.slug.asc()]

    def _is_behind(self, cursor: str) -> ColumnElement[bool]:
        key, name, slug = self._parse(cursor)
        place, here = tuple_(Adapter.name, Tenant.slug), tuple_(literal(name), literal(slug))
        # An index finds where a name is; of a pair over two tables it would read all before it.
        if self._order is AdapterOrder.NAME:
            return and_(Adapter.name >= name, place > here)
        if self._order is AdapterOrder.NAME_DOWN:
            return and_(Adapter.name <= name, place < here)
        return or_(self._key < key, and_(self._key == key, place > here))

    def _parse(self, cursor: str) -> tuple[Any, str, str]:
        try:
            order, key, name, slug = json.loads(base64.urlsafe_b64decode(cursor.encode()))
            if order != self._order:
                raise ValueError("a cursor of another order")
            if not (is_adapter_name(name) and is_slug(slug)):
                raise ValueError("a cursor of no list")
            if self._order in (AdapterOrder.CREATED, AdapterOrder.LAST_USED):
                return datetime.fromisoformat(key).astimezone(UTC), name, slug
            return float(key), name, slug
        except (ValueError, TypeError, OverflowError):
            raise InvalidValue("Not a `next_after` value of this list.", param="after") from None


def _sums_of_versions() -> Subquery:
    """By adapter: the bytes of its visible versions, and the latest one's number."""
    return (
        select(
            AdapterVersion.adapter_id,
            func.sum(AdapterVersion.size_bytes).label("num_bytes"),
            func.max(AdapterVersion.number).label("latest_number"),
        )
        .where(AdapterVersion.state.in_(VISIBLE_STATES))
        .group_by(AdapterVersion.adapter_id)
        .subquery()
    )


def _conditions(query: AdapterQuery) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [Adapter.is_visible.is_(True)]
    if query.search is not None:
        conditions.append(Adapter.name.contains(query.search.lower(), autoescape=True))
    if query.state is not None:
        conditions.append(AdapterVersion.state == query.state)
    if query.tenant_slug is not None:
        conditions.append(Tenant.slug == query.tenant_slug)
    if query.names is not None:
        conditions.append(Adapter.name.in_(query.names))
    return conditions


class _Target(NamedTuple):
    """What an alias means."""

    alias: str
    number: int
    canary: int | None
    percent: float | None


def _aliases(
    session: TenantSession | PlatformSession, ids: Sequence[str]
) -> dict[str, list[_Target]]:
    canary = aliased(AdapterVersion)
    query = (
        select(
            AdapterAlias.adapter_id,
            AdapterAlias.name,
            AdapterVersion.number,
            canary.number,
            AdapterAlias.canary_percent,
        )
        .join(AdapterVersion, AdapterVersion.id == AdapterAlias.version_id)
        .outerjoin(canary, canary.id == AdapterAlias.canary_version_id)
        .where(AdapterAlias.adapter_id.in_(ids))
        .order_by(AdapterAlias.name)
    )
    found: defaultdict[str, list[_Target]] = defaultdict(list)
    for adapter_id, alias, number, other, percent in session.execute(query):
        found[adapter_id].append(_Target(alias, number, other, percent))
    return found


def _versions_of(
    session: TenantSession | PlatformSession, ids: Sequence[str]
) -> dict[str, list[AdapterVersion]]:
    """The visible versions by adapter, the latest last."""
    query = (
        select(AdapterVersion)
        .where(AdapterVersion.adapter_id.in_(ids), AdapterVersion.state.in_(VISIBLE_STATES))
        .order_by(AdapterVersion.number)
    )
    found: defaultdict[str, list[AdapterVersion]] = defaultdict(list)
    for version in session.scalars(query):
        found[version.adapter_id].append(version)
    return found


def _uses_of(
    session: TenantSession | PlatformSession, rows: Sequence[Any]
) -> dict[tuple[str, str], AdapterUse]:
    """The use of these adapters by tenant and adapter name."""
    query = select(AdapterUse).where(
        AdapterUse.tenant_id.in_({row[0].tenant_id for row in rows}),
        AdapterUse.adapter_name.in_({row[0].name for row in rows}),
    )
    return {(use.tenant_id, use.adapter_name): use for use in session.scalars(query)}
