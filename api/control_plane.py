"""The control plane as the event loop sees it: units of work that run on threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..platform.database import Database
from ..platform.keys.principal import Principal
from ..platform.keys.service import ApiKeyService
from ..platform.sessions import PlatformSession, TenantSession
from .threads import WorkerThreads

Result = TypeVar("Result")

NUM_THREADS = 8


class ControlPlane:
    """Runs functions inside units of work; what they return is committed."""

    def __init__(self, database: Database, keys: ApiKeyService) -> None:
        self._database = database
        self._keys = keys
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

    async def authenticate(self, key: str) -> Principal:
        """Who calls with this key. Raises a PlatformError."""

        def run() -> Principal:
            with self._database.platform_transaction() as session:
                return self._keys.authenticate(session, key)

        return await self._threads.run(run)

    def close(self) -> None:
        """Wait for the units of work that run."""
        self._threads.close()
        self._database.close()
