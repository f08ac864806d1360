"""The event loop's access to the control plane: runs units of work in threads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

import structlog

from ...platform.accounts.service import NO_TIME, AccountService
from ...platform.accounts.tokens import SESSION_PREFIX
from ...platform.audit.event import Changed, Event, Origin
from ...platform.audit.service import PLATFORM_CHAIN, AuditLog
from ...platform.audit.verification import Verified
from ...platform.database import Database
from ...platform.errors import (
    DatabaseUnavailable,
    InvalidApiKey,
    SessionEnded,
    TenantNotFound,
    TenantSuspended,
)
from ...platform.keyring import Keyring
from ...platform.keys.principal import AnyPrincipal
from ...platform.keys.service import ApiKeyService
from ...platform.keys.token import is_operators
from ...platform.operators.service import OperatorService
from ...platform.secrets import API_KEY_PEPPER, AUDIT_CHAIN_KEY
from ...platform.sessions import PlatformSession, TenantSession, TenantStatements, UnitOfWork
from ...platform.tenants import service as tenants
from ...platform.tenants.access import act_on_tenant
from ...platform.webhooks.service import WebhookService
from ...platform.webhooks.signing import SigningSecrets
from .auth_cache import MAX_STALE_SECONDS, AuthCache, is_current
from .database_watch import DatabaseWatch
from .tenant_threads import AsyncTenantThreads

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

NUM_THREADS = 8
"""Concurrent units of work; tenants are served in rotation."""


class _Authenticated(Protocol):
    @property
    def principal(self) -> AnyPrincipal: ...
    @property
    def is_use_to_be_noted(self) -> bool: ...


class _Authenticator(Protocol):
    """Keys, operators' keys, and sessions."""

    def authenticate(self, session: PlatformSession, text: str, /) -> _Authenticated: ...
    def note_use(self, session: PlatformSession, text: str, /) -> None: ...


class _Sessions(NamedTuple):
    """The sessions service with the idle time of this request."""

    accounts: AccountService
    idle: timedelta

    def authenticate(self, session: PlatformSession, text: str, /) -> _Authenticated:
        return self.accounts.authenticate(session, text, self.idle)

    def note_use(self, session: PlatformSession, text: str, /) -> None:
        self.accounts.note_use(session, text, self.idle)


class _KeyIds(NamedTuple):
    """The keys service for a key that is known by its id; this does not count as a use."""

    keys: ApiKeyService
    key_id: str

    def authenticate(self, session: PlatformSession, text: str, /) -> _Authenticated:
        return self.keys.look_up(session, self.key_id)

    def note_use(self, session: PlatformSession, text: str, /) -> None:
        raise AssertionError("no use to note")


_HARMLESS = (
    *("adapter.", "alias.", "upload.", "version.", "file.", "batch.", "response."),
    *("webhook.", "sampling.", "sample."),
)
"""Prefixes of the actions that affect neither the owner nor the permissions of keys."""


def may_concern_keys(event: Event | None) -> bool:
    """Whether cached principals may be invalid after this event; true for every action that is not
    known to be safe."""
    return event is not None and not event.action.startswith(_HARMLESS)


class ControlPlane:
    """Runs functions in units of work and commits their changes."""

    def __init__(
        self, database: Database, *secrets: bytes, stale_seconds: float = MAX_STALE_SECONDS
    ) -> None:
        """`secrets`: the server's secrets, from which all keys are derived; the current one first.
        While the database is unavailable, keys stay valid if they were valid at most
        `stale_seconds` ago."""
        peppers = Keyring(secrets, API_KEY_PEPPER)
        self._database = database
        self.keys = ApiKeyService(peppers)
        self.operators = OperatorService(peppers)
        self.accounts = AccountService()
        self.webhooks = WebhookService(SigningSecrets(secrets))
        self._audit_log = AuditLog(Keyring(secrets, AUDIT_CHAIN_KEY))
        self._auth_cache = AuthCache(stale_seconds=stale_seconds)
        self._threads = AsyncTenantThreads("control-plane", NUM_THREADS)
        self.watch = DatabaseWatch(database.ping)
        self.note_change: Callable[[str | None], None] = lambda tenant_id: None
        """The function set by `tell_of_changes`; also called for changes that other servers
        made."""
        self._wakes: dict[str, list[Callable[[], None]]] = defaultdict(list)

    def tell_of_changes(self, tell: Callable[[str | None], None]) -> None:
        """Call `tell` with the tenant of each change, None for a change of the platform.

        It is called in a thread, when the change is committed and before the response is sent.
        """
        self.note_change = tell

    def wake_after(self, actions: Iterable[str], wake: Callable[[], None]) -> None:
        """Call `wake` after each change of a tenant by this server with one of these actions.

        It is called in a thread, when the change is committed.
        """
        for action in actions:
            self._wakes[action].append(wake)

    async def read(self, tenant_id: str, query: Callable[[TenantSession], Result]) -> Result:
        """The query's result, on the tenant's rows. Raises a PlatformError."""

        def run() -> Result:
            with self._database.transaction(tenant_id, read_only=True) as session:
                return query(session)

        return await self._run(tenant_id, run)

    async def write(self, tenant_id: str, change: Callable[[TenantSession], Result]) -> Result:
        """The change's result, once it is committed. Raises a PlatformError."""

        def run() -> Result:
            with self._database.transaction(tenant_id) as session:
                return change(session)

        return await self._run(tenant_id, run)

    async def write_plain(
        self, tenant_id: str, change: Callable[[TenantStatements], Result]
    ) -> Result:
        """Like `write`, with plain statements, for the writes of every request."""

        def run() -> Result:
            with self._database.statements(tenant_id) as statements:
                return change(statements)

        return await self._run(tenant_id, run)

    async def change(
        self, tenant_id: str, origin: Origin, change: Callable[[TenantSession], Changed[Result]]
    ) -> Result:
        """The change's result, once it is committed together with its entry in the audit log.

        The origin's guard is called first in the transaction. Raises a PlatformError.
        """

        def run() -> Result:
            is_carried_out = False
            try:
                with self._database.transaction(tenant_id, guard=origin.guard) as session:
                    changed = change(session)
                    if changed.event is not None:
                        self._audit_log.record(session, origin, changed.event)
                    is_carried_out = True
            finally:
                if is_carried_out:  # and committed, even if the answer to that was lost
                    if may_concern_keys(changed.event):
                        self._auth_cache.clear_tenant(tenant_id)
                    self.note_change(tenant_id)
                    self._wake_after(changed.event)
            return changed.result

        return await self._run(tenant_id, run)

    def _wake_after(self, event: Event | None) -> None:
        for wake in self._wakes.get(event.action, ()) if event is not None else ():
            wake()

    async def change_platform(
        self, origin: Origin, change: Callable[[PlatformSession], Changed[Result]]
    ) -> Result:
        """Like `change`, for changes outside tenants; the entry is in the platform's log."""

        def run() -> Result:
            is_carried_out = False
            try:
                with self._database.platform_transaction(guard=origin.guard) as session:
                    changed = change(session)
                    if changed.event is not None:
                        self._audit_log.record_platform(session, origin, changed.event)
                    is_carried_out = True
            finally:
                if is_carried_out:
                    self._auth_cache.clear()
                    self.note_change(None)
            return changed.result

        return await self._run(None, run)

    async def change_own(
        self,
        tenant_id: str | None,
        origin: Origin,
        change: Callable[[UnitOfWork], Changed[Result]],
    ) -> Result:
        """`change` in a tenant, or `change_platform` if it is None: for operations that both
        have."""
        if tenant_id is None:
            return await self.change_platform(origin, change)
        return await self.change(tenant_id, origin, change)

    async def note(self, tenant_id: str | None, origin: Origin, event: Event) -> None:
        """Write an audit entry without a change, to the platform's log if `tenant_id` is None."""

        def run() -> None:
            if tenant_id is None:
                with self._database.platform_transaction(guard=origin.guard) as session:
                    self._audit_log.record_platform(session, origin, event)
            else:
                with self._database.transaction(tenant_id, guard=origin.guard) as confined:
                    self._audit_log.record(confined, origin, event)

        await self._run(tenant_id, run)

    async def read_all_tenants(self, query: Callable[[PlatformSession], Result]) -> Result:
        """The query's result over all tenants' rows, for recovery after a start."""

        def run() -> Result:
            with self._database.platform_transaction(read_only=True) as session:
                return query(session)

        return await self._run(None, run)

    async def write_all_tenants(self, change: Callable[[PlatformSession], Result]) -> Result:
        """The change's result over all tenants' rows, once it is committed, for upkeep."""

        def run() -> Result:
            with self._database.platform_transaction() as session:
                return change(session)

        return await self._run(None, run)

    async def verify_audit(self, tenant: str | None, *, after: int, limit: int) -> Verified:
        """Verify a part of a chain of the audit log; None is the platform's chain.

        Raises TenantNotFound.
        """

        def look(session: PlatformSession) -> Verified:
            chain = PLATFORM_CHAIN if tenant is None else tenants.get_tenant(session, tenant).id
            return self._audit_log.verify(session, chain, after=after, limit=limit)

        return await self.read_all_tenants(look)

    async def authenticate(self, token: str, tenant_slug: str | None = None) -> AnyPrincipal:
        """The caller with this key, in the tenant with this slug if one is given.

        Cached for a few seconds, and for longer while the database is unavailable. Raises a
        PlatformError: InvalidApiKey, TenantSuspended, or TenantNotFound for a slug that the key may
        not name.
        """
        if token.startswith(SESSION_PREFIX):  # known perhaps, but no key
            raise InvalidApiKey
        service = self.operators if is_operators(token) else self.keys
        return await self._authenticate(service, token, tenant_slug)

    async def authenticate_key_id(self, key_id: str) -> AnyPrincipal:
        """The caller with the key of this id, for a request that the key's owner has left with this
        server; otherwise as above."""
        # No header holds a NUL, so no client can name this entry of the cache.
        return await self._authenticate(_KeyIds(self.keys, key_id), f"\0{key_id}", None)

    async def authenticate_session(
        self, token: str, tenant_slug: str | None = None, idle: timedelta = NO_TIME
    ) -> AnyPrincipal:
        """The caller that is signed in with this token; otherwise as above, with SessionEnded.

        `idle`: the time since the user was last active.
        """
        return await self._authenticate(_Sessions(self.accounts, idle), token, tenant_slug)

    async def _authenticate(
        self, service: _Authenticator, token: str, tenant_slug: str | None
    ) -> AnyPrincipal:
        known = self._auth_cache.get(token, tenant_slug)
        if known is not None and is_current(known):
            return known
        try:
            return await self._run(None, lambda: self._look_up(service, token, tenant_slug))
        except DatabaseUnavailable:
            known = self._auth_cache.get(token, tenant_slug, allow_stale=True)
            if known is None or not is_current(known):
                raise
            return known

    def _look_up(
        self, service: _Authenticator, token: str, tenant_slug: str | None
    ) -> AnyPrincipal:
        ticket = self._auth_cache.begin()
        try:
            with self._database.platform_transaction(read_only=True) as session:
                found = service.authenticate(session, token)
                principal = act_on_tenant(session, found.principal, tenant_slug)
        except (InvalidApiKey, SessionEnded, TenantSuspended, TenantNotFound):
            self._auth_cache.drop(token, tenant_slug)
            raise
        self._auth_cache.put(token, tenant_slug, principal, ticket)
        if found.is_use_to_be_noted:
            self._threads.start(None, self._note_use, service, token)
        return principal

    def _note_use(self, service: _Authenticator, token: str) -> None:
        try:
            with self._database.platform_transaction() as session:
                service.note_use(session, token)
        except DatabaseUnavailable:
            log.warning("use_not_noted")  # the next look-up tries again

    async def _run(self, tenant_id: str | None, work: Callable[[], Result]) -> Result:
        return await self.watch.unless_away(lambda: self._threads.run(tenant_id, work))

    def close(self) -> None:
        """Wait for running units of work."""
        self._threads.close()
        self._database.close()
