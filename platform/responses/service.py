"""Stores, finds and removes responses.

A key that is restricted to adapters finds the responses of its own only: those of others may be
answers of adapters that it may not use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import aliased, defer, load_only

from ..base import utc_now
from ..errors import ConversationTooLarge, QuotaExceeded, ResponseNotFound
from ..keys.principal import Principal
from ..sessions import PlatformSession, TenantSession
from .models import StoredResponse

MAX_RESPONSES = 10_000
"""Of one tenant."""
MAX_TENANT_BYTES = 1 << 30
"""Of all stored responses of one tenant."""
MAX_CONVERSATION_BYTES = 16 << 20
"""Of the responses that a request continues: they are read into memory."""
ROWS_AT_ONCE = 500
"""Expired rows that one transaction deletes."""


def check_room(session: TenantSession, size_bytes: int) -> None:
    """Check that one more response of this size can be stored. Raises QuotaExceeded."""
    num_responses, num_bytes = session.execute(
        select(func.count(), func.coalesce(func.sum(StoredResponse.size_bytes), 0)).select_from(
            StoredResponse
        )
    ).one()
    if num_responses >= MAX_RESPONSES:
        raise QuotaExceeded("stored responses", limit=MAX_RESPONSES, used=num_responses)
    if num_bytes + size_bytes > MAX_TENANT_BYTES:
        raise QuotaExceeded(
            "bytes of stored responses", limit=MAX_TENANT_BYTES, used=num_bytes, wanted=size_bytes
        )


def add(session: TenantSession, response: StoredResponse, earlier: Collection[str]) -> None:
    """Store a response. The `earlier` ones of its conversation are kept as long as it is."""
    session.add(response)
    continued = (
        select(StoredResponse)
        .where(StoredResponse.id.in_(earlier), StoredResponse.expires_at < response.expires_at)
        .options(load_only(StoredResponse.expires_at))
        .order_by(StoredResponse.id)
        .with_for_update()
    )
    for each in session.scalars(continued):
        each.expires_at = response.expires_at
    session.flush()


def get_response(session: TenantSession, response_id: str, *, viewer: Principal) -> StoredResponse:
    """The tenant's response. Raises ResponseNotFound, also if it has expired or the viewer may not
    see it."""
    found = session.scalars(_visible(viewer, response_id)).one_or_none()
    if found is None:
        raise ResponseNotFound(f"There is no response `{response_id}`.")
    return found


def list_responses(
    session: TenantSession, *, after: str | None, limit: int
) -> Sequence[StoredResponse]:
    """The tenant's responses by id, without their content: at most `limit` after this id."""
    query = select(StoredResponse).where(StoredResponse.expires_at > utc_now())
    if after is not None:
        query = query.where(StoredResponse.id > after)
    content = (defer(StoredResponse.input), defer(StoredResponse.response))
    return session.scalars(query.options(*content).order_by(StoredResponse.id).limit(limit)).all()


def list_conversation(
    session: TenantSession, response_id: str, *, viewer: Principal
) -> Sequence[StoredResponse]:
    """The response and all that it continues, the oldest first.

    Raises ResponseNotFound, also if one of them is missing, and ConversationTooLarge.
    """
    last = get_response(session, response_id, viewer=viewer)
    links = (
        select(StoredResponse.id, StoredResponse.previous_id, StoredResponse.size_bytes)
        .where(StoredResponse.id == last.id)
        .cte("links", recursive=True)
    )
    older = aliased(StoredResponse)
    links = links.union_all(
        select(older.id, older.previous_id, older.size_bytes).join(
            links, older.id == links.c.previous_id
        )
    )
    found = {id_: (previous, size) for id_, previous, size in session.execute(select(links))}
    if not {previous for previous, _ in found.values() if previous} <= found.keys():
        raise ResponseNotFound(f"A response that `{response_id}` continues has been deleted.")
    num_bytes = sum(size for _, size in found.values())
    if num_bytes > MAX_CONVERSATION_BYTES:
        raise ConversationTooLarge(
            f"The responses from the first to `{response_id}` have {num_bytes} bytes; a request "
            f"can continue at most {MAX_CONVERSATION_BYTES}."
        )
    rows = session.scalars(select(StoredResponse).where(StoredResponse.id.in_(found))).all()
    by_id = {row.id: row for row in rows}
    ordered = [last]
    while (previous := ordered[-1].previous_id) is not None:
        ordered.append(by_id[previous])
    return ordered[::-1]


def remove(session: TenantSession, response_id: str, *, viewer: Principal) -> None:
    """Delete a response. Those that continue it stay. Raises ResponseNotFound."""
    session.delete(get_response(session, response_id, viewer=viewer))
    session.flush()


def count_expired_of_all_tenants(session: PlatformSession, now: datetime) -> int:
    """How many responses have expired and are still stored."""
    query = select(func.count(StoredResponse.id)).where(StoredResponse.expires_at <= now)
    return session.scalars(query).one()


def purge(session: PlatformSession, now: datetime) -> int:
    """Delete some of the responses that have expired; how many.

    One that is continued meanwhile stays: PostgreSQL waits for who extends it, and looks at the
    outer condition again.
    """
    oldest = (
        select(StoredResponse.id)
        .where(StoredResponse.expires_at <= now)
        .order_by(StoredResponse.expires_at)
        .limit(ROWS_AT_ONCE)
    )
    deleted = session.execute(
        delete(StoredResponse)
        .where(StoredResponse.id.in_(oldest.scalar_subquery()), StoredResponse.expires_at <= now)
        .returning(StoredResponse.id)
    )
    return len(deleted.all())


def _visible(viewer: Principal, response_id: str) -> Select[StoredResponse]:
    query = select(StoredResponse).where(
        StoredResponse.id == response_id, StoredResponse.expires_at > utc_now()
    )
    if viewer.adapters is not None:
        query = query.where(StoredResponse.key_id == viewer.key_id)
    return query
