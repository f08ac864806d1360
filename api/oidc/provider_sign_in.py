"""Sign-in at the console through the identity provider."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import NamedTuple

import structlog

from ...platform.accounts.repository import Holder
from ...platform.accounts.service import OpenedSession, actor_of
from ...platform.audit.event import UNKNOWN, Changed, Event, Origin
from ...platform.errors import IdentityNotMapped, PlatformError, SignInRejected, TenantNotFound
from ...platform.identities import service as identities
from ...platform.identities.service import Person
from ...platform.keys.principal import SYSTEM, OperatorRole, TenantRole
from ...platform.networks import Address
from ...platform.sessions import PlatformSession, TenantSession, UnitOfWork
from ...platform.tenants import service as tenants
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from .flow import Flow, Flows
from .id_token import Claims
from .provider import Provider
from .role_rules import RoleRule, first_rule

log = structlog.get_logger(__name__)

MAX_CONCURRENT = 8
"""Sign-ins that wait for the provider; more are refused as `overloaded`."""


class Begun(NamedTuple):
    """A flow, and where the browser signs in."""

    flow: Flow
    url: str


class Visit(NamedTuple):
    """The request with which the browser comes back."""

    redirect_uri: str
    """As at the beginning of the flow."""
    address: Address | None
    request_id: str


class ProviderSignIn:
    """One per server that has an identity provider."""

    def __init__(self, control_plane: ControlPlane, secret: bytes, provider: Provider) -> None:
        """`secret`: the server's current secret."""
        self.provider = provider
        self._control_plane = control_plane
        self._flows = Flows(secret)
        self._num_running = 0

    async def begin(self, redirect_uri: str, *, again: bool) -> Begun:
        """Begin a flow. `again`: the person must authenticate even if signed in at the provider.
        Raises ApiError."""
        flow = self._flows.begin()
        async with self._place():
            url = await self.provider.authorization_url(flow, redirect_uri, again=again)
        return Begun(flow, url)

    async def finish(
        self, cookie: str | None, state: str, code: str, visit: Visit
    ) -> OpenedSession:
        """Sign in with the code that the provider sent by this browser.

        Raises SignInRejected, IdentityNotMapped, IdentityConflict, AccountDisabled,
        TenantSuspended, QuotaExceeded, LastAdministrator or ApiError.
        """
        try:
            claims = await self._authenticate(cookie, state, code, visit)
        except SignInRejected as refusal:
            log.warning("sign_in_rejected", reason=str(refusal))
            refusal.refused = UNKNOWN
            raise
        person = _person(self.provider.config.issuer, claims)
        try:
            return await self._admit(person, claims, visit)
        except PlatformError as refusal:
            await self._note_refusal(person, refusal, visit)
            raise

    async def _authenticate(
        self, cookie: str | None, state: str, code: str, visit: Visit
    ) -> Claims:
        """The person's claims. A flow gets here once, whether this succeeds or not."""
        flow = self._flows.parse(cookie or "")
        if flow is None or not hmac.compare_digest(flow.state.encode(), state.encode()):
            raise SignInRejected("it was begun in another browser, or too long ago")
        expires_at = datetime.fromtimestamp(flow.expires_at, UTC)
        await self._control_plane.write_all_tenants(
            lambda session: identities.spend(session, flow.hash, expires_at)
        )
        async with self._place():
            return await self.provider.authenticate(flow, code, visit.redirect_uri)

    async def _admit(self, person: Person, claims: Claims, visit: Visit) -> OpenedSession:
        config = self.provider.config
        rule = first_rule(config.rules, _groups(claims.get(config.groups_claim)))
        if rule is None:
            raise IdentityNotMapped
        tenant_id = None if rule.tenant is None else await self._tenant_id(rule.tenant)
        holder = await self._holder(person, rule, tenant_id, visit)
        accounts = self._control_plane.accounts

        def sign_in(session: UnitOfWork) -> Changed[OpenedSession]:
            opened = accounts.open_proved(session, holder, person.issuer, _authenticated_at(claims))
            details = {"issuer": person.issuer, "subject": person.subject}
            return Changed(opened, Event("session.create", holder.account.id, details))

        origin = Origin(actor_of(holder), visit.request_id, _text(visit.address))
        return await self._control_plane.change_own(tenant_id, origin, sign_in)

    async def _holder(
        self, person: Person, rule: RoleRule, tenant_id: str | None, visit: Visit
    ) -> Holder:
        """The person's account, with the role of the rule."""

        def admit(session: UnitOfWork) -> Changed[Holder]:
            if isinstance(rule.role, OperatorRole):
                assert isinstance(session, PlatformSession)
                return identities.admit_operator(session, person, rule.role)
            assert isinstance(session, TenantSession)
            assert isinstance(rule.role, TenantRole)
            return identities.admit_user(session, person, rule.role)

        origin = Origin(SYSTEM, visit.request_id, _text(visit.address))
        return await self._control_plane.change_own(tenant_id, origin, admit)

    async def _tenant_id(self, slug: str) -> str:
        try:
            return await self._control_plane.read_all_tenants(
                lambda session: tenants.get_tenant(session, slug).id
            )
        except TenantNotFound as exc:
            log.warning("oidc_tenant_not_found", tenant=slug)
            raise IdentityNotMapped from exc

    async def _note_refusal(self, person: Person, refusal: PlatformError, visit: Visit) -> None:
        """The operator needs the subject to link the person, or to see who asks for access."""
        details = {"code": refusal.code, "issuer": person.issuer, "subject": person.subject}
        await self._control_plane.note(
            None,
            Origin(UNKNOWN.actor, visit.request_id, _text(visit.address)),
            Event("session.refuse", "identity", details),
        )

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._num_running >= MAX_CONCURRENT:
            raise ApiError("overloaded")
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1


def _person(issuer: str, claims: Claims) -> Person:
    email = claims.get("email")
    is_usable = isinstance(email, str) and claims.get("email_verified", True) is True
    return Person(issuer, claims["sub"], email if is_usable else None)


def _groups(claim: object) -> frozenset[str]:
    """The groups in the claim: a list of texts, or one text."""
    groups = claim if isinstance(claim, list) else [claim]
    return frozenset(group for group in groups if isinstance(group, str))


def _authenticated_at(claims: Claims) -> datetime | None:
    """When the person authenticated at the provider, not later than now; None: unknown."""
    moment = claims.get("auth_time")
    if not isinstance(moment, (int, float)) or not moment > 0:
        return None
    return datetime.fromtimestamp(min(moment, time.time()), UTC)


def _text(address: Address | None) -> str | None:
    return None if address is None else str(address)
