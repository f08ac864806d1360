"""The control plane as the event loop sees it: units of work that run on threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..platform.audit.event import Changed, Origin
from ..platform.audit.service import PLATFORM_CHAIN, AuditLog
from ..platform.audit.verification import Verified
from ..platform.database import Database
from ..platform.keyring import Keyring
from ..platform.keys.principal import OperatorPrincipal, Principal
from ..platform.keys.service import ApiKeyService
from ..platform.operators.service import OperatorService
from ..platform.secrets import API_KEY_PEPPER, AUDIT_CHAIN_KEY, derive_key
from ..platform.sessions import PlatformSession, TenantSession
from ..platform.tenants import service as tenants
from .threads import WorkerThreads

Result = TypeVar("Result")

NUM_THREADS = 8


class ControlPlane:
    """Runs functions inside units of work; what they return is committed."""

    def __init__(self, database: Database, secret: bytes) -> None:
        """`secret`: the server's, from which the keys of every purpose are derived."""
        pepper = derive_key(secret, API_KEY_PEPPER)
        self._database = database
        self._keys = ApiKeyService(pepper)
        self._operators = OperatorService(pepper)
        self._audit_log = AuditLog(Keyring([secret], AUDIT_CHAIN_KEY))
        self._threads = WorkerThreads("control-plane", NUM_THREADS)

    async def read(self, tenant_id: str, query: Callable[[TenantSession], Result]) -> Result:
        """The query's result, on the tenant's rows. Raises a PlatformError."""

        def run() -> Result:
            with self._database.transaction(tenant_id, read_only=True) as session:
                return query(session)

        return await self._threads.run(run)

    async def write(self, tenant_id: str, change: Callable[[TenantSession], Result]) -> Result:
        """The change's result, once it is committed. Raises a PlatformError."""

        def run() -> Result:
            with self._database.transaction(tenant_id) as session:
                return change(session)

        return await self._threads.run(run)

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

        return await self._threads.run(run)

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

        return await self._threads.run(run)

    async def read_all_tenants(self, query: Callable[[PlatformSession], Result]) -> Result:
        """The query's result, on everybody's rows: for recovery after a start."""

        def run() -> Result:
            with self._database.platform_transaction(read_only=True) as session:
                return query(session)

        return await self._threads.run(run)

    async def write_all_tenants(self, change: Callable[[PlatformSession], Result]) -> Result:
        """The change's result, once it is committed, on everybody's rows: for upkeep."""

        def run() -> Result:
            with self._database.platform_transaction() as session:
                return change(session)

        return await self._threads.run(run)

    async def verify_audit(self, tenant: str | None, *, after: int, limit: int) -> Verified:
        """Look at a part of a chain of the audit log; None is the platform's own.

        Raises TenantNotFound.
        """

        def look(session: PlatformSession) -> Verified:
            chain = PLATFORM_CHAIN if tenant is None else tenants.get_tenant(session, tenant).id
            return self._audit_log.verify(session, chain, after=after, limit=limit)

        return await self.read_all_tenants(look)

    async def authenticate(self, key: str) -> Principal:
        """Who calls with this tenant's key. Raises a PlatformError."""

        def run() -> Principal:
            with self._database.platform_transaction() as session:
                return self._keys.authenticate(session, key)

        return await self._threads.run(run)

    async def authenticate_operator(self, key: str) -> OperatorPrincipal:
        """Which operator calls with this key. Raises a PlatformError."""

        def run() -> OperatorPrincipal:
            with self._database.platform_transaction(read_only=True) as session:
                return self._operators.authenticate(session, key)

        return await self._threads.run(run)

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

        return await self._threads.run(run)

    def close(self) -> None:
        """Wait for the units of work that run."""
        self._threads.close()
        self._database.close()
