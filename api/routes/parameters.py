"""What the routes of adapters take alike: who may call, and which version is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, NamedTuple

from fastapi import Depends, Path
from starlette.requests import Request

from ...adapters.identity import AdapterKey
from ...platform.adapters import service
from ...platform.adapters.lookup import no_adapter
from ...platform.adapters.models import Adapter, AdapterVersion
from ...platform.audit.event import Origin
from ...platform.keys.principal import Principal, Scope
from ...platform.sessions import TenantSession
from ..auth import Caller, origin_of, require
from ..runtime import Runtime


async def request_origin(request: Request, caller: Caller) -> Origin:
    """A dependency that yields where the request comes from, for the audit log."""
    return origin_of(request, caller)


RequestOrigin = Annotated[Origin, Depends(request_origin)]


def _with_adapter(scope: Scope) -> Callable[..., Awaitable[Principal]]:
    """A dependency like `require`, for whom the adapter in the path is there to see.

    For a key that is restricted to others it is not there, whether it is or not.
    """

    async def check_adapter(
        request: Request, principal: Annotated[Principal, Depends(require(scope))]
    ) -> Principal:
        name = request.path_params.get("name")
        if name is not None and not principal.may_use(name):
            raise no_adapter(name)
        return principal

    return check_adapter


Reader = Annotated[Principal, Depends(_with_adapter(Scope.ADAPTERS_READ))]
Writer = Annotated[Principal, Depends(_with_adapter(Scope.ADAPTERS_WRITE))]
Number = Annotated[int, Path(ge=1, le=999_999_999)]


class FoundVersion(NamedTuple):
    """A version and the adapter it belongs to."""

    adapter: Adapter
    version: AdapterVersion

    @property
    def key(self) -> AdapterKey:
        return AdapterKey(self.version.tenant_id, self.version.digest)


async def find_version(
    runtime: Runtime, principal: Principal, name: str, number: int
) -> FoundVersion:
    """One visible version of the caller's. Raises AdapterNotFound or VersionNotFound."""

    def find(session: TenantSession) -> FoundVersion:
        version = service.get_version(session, name, number)  # first: it reloads the adapter's row
        return FoundVersion(service.get_adapter(session, name), version)

    return await runtime.control_plane.read(principal.tenant_id, find)
