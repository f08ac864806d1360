"""The control plane as the event loop sees it: units of work that run on threads of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from ..platform.audit.event import Changed, Origin
from ..platform.audit.service import AuditLog
from ..platform.database import Database
from ..platform.errors import DatabaseUnavailable, PlatformError
from ..platform.keys.principal import OperatorPrincipal, Principal
from ..platform.keys.service import ApiKeyService
from ..platform.operators.service import OperatorService
from ..platform.secrets import API_KEY_PEPPER, AUDIT_CHAIN_KEY, derive_key
from ..platform.sessions import PlatformSession, TenantSession
from ..platform.tenants import service as tenants
from .database_watch import DatabaseWatch
from .last_seen import LastSeen
from .threads import WorkerThreads

Result = TypeVar("Result")

NUM_THREADS = 8
STALE_SECONDS = 300.0


class ControlPlane:
    """Runs functions inside units of work; what they return is committed."""

    def __init__(
        self, database: Database, secret: bytes, *, stale_seconds: float = STALE_SECONDS
    ) -> None:
        """`secret`: the server's, from which the keys of every purpose are derived.

        While the database is away, keys are good that were so at most `stale_seconds` ago.
        """
        pepper = derive_key(secret, API_KEY_PEPPER)
        self._database = database
        self._keys = ApiKeyService(pepper)
        self._operators = OperatorService(pepper)
        self._audit_log = AuditLog(derive_key(secret, AUDIT_CHAIN_KEY))
        self._threads = WorkerThreads("control-plane", NUM_THREADS)
        self.watch = DatabaseWatch(database.ping)
        self._principals = LastSeen[bytes, Principal](stale_seconds)

    async def read(self, tenant_id: str, query: Callable[[TenantSession], Result]) -> Result:
        """The query's result, on the tenant's rows. Raises a PlatformError."""

        def run() -> Result:
            with self._database.transaction(tenant_id, read_only=True) as session:
                return query(session)

        return await self._run(run)

    async def write(self, tenant_id: str, change: Callable[[TenantSession], Result]) -> Result:
        """The change's result, once it is committed. Raises a PlatformError."""

        def run() -> Result:
            with self._database.transaction(tenant_id) as session:
                return change(session)

        return await self._run(run)

    async def change(
        self, tenant_id: str, origin: Origin, change: Callable[[TenantSession], Changed[Result]]
    ) -> Result:
        """The change's result, once it is committed together with its entry in the audit log.

        Raises a PlatformError.
        """

        def run() -> Result:
            with self._database.transaction(tenant_id) as session:
                changed = change(session)
                if changed.event is not None:
                    self._audit_log.record(session, origin, changed.event)
                return changed.result

        return await self._run(run)

    async def change_platform(
        self, origin: Origin, change: Callable[[PlatformSession], Changed[Result]]
    ) -> Result:
        """Like `change`, for what belongs to no tenant; the entry is the platform's own."""

        def run() -> Result:
            with self._database.platform_transaction() as session:
                changed = change(session)
                if changed.event is not None:
                    self._audit_log.record_platform(session, origin, changed.event)
                return changed.result

        return await self._run(run)

    async def read_all_tenants(self, query: Callable[[PlatformSession], Result]) -> Result:
        """The query's result, on everybody's rows: for recovery after a start."""

        def run() -> Result:
            with self._database.platform_transaction(read_only=True) as session:
                return query(session)

        return await self._run(run)

    async def write_all_tenants(self, change: Callable[[PlatformSession], Result]) -> Result:
        """The change's result, once it is committed, on everybody's rows: for upkeep."""

        def run() -> Result:
            with self._database.platform_transaction() as session:
                return change(session)

        return await self._run(run)

    async def authenticate(self, key: str) -> Principal:
        """Who calls with this tenant's key. Raises a PlatformError."""

        def run() -> Principal:
            with self._database.platform_transaction() as session:
                return self._keys.authenticate(session, key)

        digest = hashlib.sha256(key.encode()).digest()
        try:
            principal = await self._run(run)
        except DatabaseUnavailable:
            seen = self._principals.recall(digest)
            if seen is None:
                raise
            return seen
        except PlatformError:
            self._principals.forget(digest)
            raise
        self._principals.note(digest, principal)
        return principal

    async def authenticate_operator(self, key: str) -> OperatorPrincipal:
        """Which operator calls with this key. Raises a PlatformError."""

        def run() -> OperatorPrincipal:
            with self._database.platform_transaction(read_only=True) as session:
                return self._operators.authenticate(session, key)

        return await self._run(run)

    async def act_on_tenant(self, operator: OperatorPrincipal, slug: str) -> Principal:
        """The operator as a caller within a tenant. Raises TenantNotFound."""

        def run() -> Principal:
            with self._database.platform_transaction(read_only=True) as session:
                tenant = tenants.get_tenant(session, slug)
            return Principal(
                tenant_id=tenant.id,
                tenant_slug=tenant.slug,
                actor=operator.actor,
                scopes=operator.role.scopes,
                key_id=None,
                tenant_weight=tenant.weight,
            )

        return await self._run(run)

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await self.watch.unless_away(lambda: self._threads.run(work))

    def close(self) -> None:
        """Wait for the units of work that run."""
        self._threads.close()
        self._database.close()
