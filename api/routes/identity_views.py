"""Converts tenants, operators, users and keys to API views."""

from __future__ import annotations

from dataclasses import asdict

from ...platform.accounts.service import IssuedInvitation
from ...platform.identities.models import Identity
from ...platform.keys.models import ApiKey
from ...platform.keys.principal import AnyPrincipal, OperatorPrincipal
from ...platform.keys.service import IssuedKey
from ...platform.operators.models import Operator, OperatorKey
from ...platform.operators.service import IssuedOperatorKey
from ...platform.tenants.models import Tenant, TenantDeletion
from ...platform.tenants.summaries import TenantSummary
from ...platform.users.models import User
from ..schemas.identity import (
    IdentityView,
    IssuedKeyView,
    IssuedOperatorKeyView,
    KeyView,
    ObjectsRemovedView,
    OperatorKeyView,
    OperatorView,
    TenantDeletionView,
    TenantSummaryView,
    TenantView,
    TokenBudgetView,
    UserView,
)
from ..schemas.me import ActorView, MeView, TenantName
from ..schemas.sessions import InvitationView
from ..schemas.slo import SloView


def tenant_view(tenant: Tenant) -> TenantView:
    return TenantView(
        id=tenant.id,
        slug=tenant.slug,
        name=tenant.name,
        weight=tenant.weight,
        slo=SloView(tenant.target_ttft_ms, tenant.target_itl_ms),
        created_at=tenant.created_at,
        suspended_at=tenant.suspended_at,
    )


def tenant_summary_view(summary: TenantSummary) -> TenantSummaryView:
    tenant, budget = summary.tenant, summary.budget
    return TenantSummaryView(
        id=tenant.id,
        slug=tenant.slug,
        name=tenant.name,
        weight=tenant.weight,
        slo=SloView(tenant.target_ttft_ms, tenant.target_itl_ms),
        created_at=tenant.created_at,
        suspended_at=tenant.suspended_at,
        requests=summary.num_requests,
        tokens=summary.num_tokens,
        budget=None if budget is None else TokenBudgetView(**budget._asdict()),
    )


def tenant_deletion_view(deletion: TenantDeletion) -> TenantDeletionView:
    objects = deletion.receipt.get("objects")
    return TenantDeletionView(
        id=deletion.id,
        slug=deletion.slug,
        with_usage=deletion.with_usage,
        requested_at=deletion.requested_at,
        finished_at=deletion.finished_at,
        objects=None if objects is None else ObjectsRemovedView(**objects),
        rows=deletion.receipt.get("rows", {}),
    )


def operator_view(operator: Operator) -> OperatorView:
    return OperatorView(
        id=operator.id,
        name=operator.name,
        role=operator.role,
        created_at=operator.created_at,
        disabled_at=operator.disabled_at,
    )


def operator_key_view(key: OperatorKey) -> OperatorKeyView:
    return OperatorKeyView(
        id=key.id,
        name=key.name,
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
        networks=key.networks,
    )


def issued_operator_key_view(issued: IssuedOperatorKey) -> IssuedOperatorKeyView:
    shown = asdict(operator_key_view(issued.key))
    return IssuedOperatorKeyView(**shown, key=issued.text)


def user_view(user: User) -> UserView:
    return UserView(
        id=user.id,
        email=user.email,
        role=user.role,
        created_at=user.created_at,
        disabled_at=user.disabled_at,
    )


def identity_view(identity: Identity) -> IdentityView:
    return IdentityView(
        issuer=identity.issuer, subject=identity.subject, created_at=identity.created_at
    )


def key_view(key: ApiKey) -> KeyView:
    return KeyView(
        id=key.id,
        name=key.name,
        scopes=key.scopes,
        adapters=key.adapters,
        networks=key.networks,
        user=key.user_id,
        created_at=key.created_at,
        created_by=key.created_by,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
        successor=key.successor_id,
    )


def issued_key_view(issued: IssuedKey) -> IssuedKeyView:
    shown = asdict(key_view(issued.key))
    return IssuedKeyView(**shown, key=issued.text)


def invitation_view(issued: IssuedInvitation, base_url: str) -> InvitationView:
    # The part after '#' is never sent to a server or proxy, so it is not logged.
    url = f"{base_url}/console/join#{issued.token}"
    return InvitationView(token=issued.token, expires_at=issued.expires_at, url=url)


def me_view(caller: AnyPrincipal) -> MeView:
    actor = ActorView(caller.actor.kind, caller.actor.id, caller.actor.name)
    networks = None if caller.networks is None else [str(net) for net in caller.networks]
    if isinstance(caller, OperatorPrincipal):
        return MeView(
            actor=actor,
            tenant=None,
            operator_role=caller.role,
            scopes=sorted(caller.role.scopes),
            adapters=None,
            networks=networks,
            key=None,
            expires_at=caller.expires_at,
        )
    return MeView(
        actor=actor,
        tenant=TenantName(caller.tenant_id, caller.tenant_slug),
        operator_role=caller.operator_role,
        scopes=sorted(caller.scopes),
        adapters=None if caller.adapters is None else sorted(caller.adapters),
        networks=networks,
        key=caller.key_id,
        expires_at=caller.expires_at,
    )
