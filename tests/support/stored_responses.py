"""Stored responses in a database."""

from __future__ import annotations

from datetime import timedelta

from loraplex.platform.base import utc_now
from loraplex.platform.keys.principal import ALL_SCOPES, Actor, ActorKind, Principal
from loraplex.platform.responses import service
from loraplex.platform.responses.models import StoredResponse
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant

KEY_ID = "k" * 12


def principal_of(
    tenant: Tenant, *, adapters: frozenset[str] | None = None, key_id: str = KEY_ID
) -> Principal:
    return Principal(
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
        actor=Actor(ActorKind.KEY, key_id, "ci"),
        scopes=ALL_SCOPES,
        key_id=key_id,
        adapters=adapters,
    )


def store(
    session: TenantSession,
    response_id: str,
    *,
    after: str | None = None,
    earlier: tuple[str, ...] = (),
    days: float = 1,
    size: int = 10,
) -> StoredResponse:
    response = StoredResponse(
        id=response_id,
        key_id=KEY_ID,
        previous_id=after,
        size_bytes=size,
        expires_at=utc_now() + timedelta(days=days),
        input=b"[]",
        response=b"{}",
    )
    service.add(session, response, earlier)
    session.flush()
    return response


def conversation(session: TenantSession, viewer: Principal, response_id: str) -> list[str]:
    found = service.list_conversation(session, response_id, viewer=viewer)
    return [each.id for each in found]
