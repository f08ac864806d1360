"""The shared parameters of the adapter routes: the caller and the version."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from fastapi import Depends, Path
from starlette.requests import Request

from ...adapters.identity import AdapterKey
from ...platform.adapters import service
from ...platform.adapters.lookup import no_adapter, version_of
from ...platform.adapters.models import Adapter, AdapterVersion
from ...platform.audit.event import Origin
from ...platform.keys.principal import Principal, Scope
from ...platform.sessions import TenantSession
from ..contract.promises import terms
from ..http.auth import Caller, origin_of, require
from ..server.runtime import Runtime


async def request_origin(request: Request, caller: Caller) -> Origin:
    """A dependency that yields where the request comes from, for the audit log."""
    return origin_of(request, caller)


RequestOrigin = Annotated[Origin, Depends(request_origin)]


_MayRead = Annotated[Principal, Depends(require(Scope.ADAPTERS_READ))]
_MayWrite = Annotated[Principal, Depends(require(Scope.ADAPTERS_WRITE))]
_MayReadSamples = Annotated[Principal, Depends(require(Scope.SAMPLES_READ))]
_MayWriteSamples = Annotated[Principal, Depends(require(Scope.SAMPLES_WRITE))]


@terms(errors=("adapter_not_found",))
async def _reader(request: Request, principal: _MayRead) -> Principal:
    return _with_adapter(request, principal)


@terms(errors=("adapter_not_found",))
async def _writer(request: Request, principal: _MayWrite) -> Principal:
    return _with_adapter(request, principal)


@terms(errors=("adapter_not_found",))
async def _sample_reader(request: Request, principal: _MayReadSamples) -> Principal:
    return _with_adapter(request, principal)


@terms(errors=("adapter_not_found",))
async def _sample_writer(request: Request, principal: _MayWriteSamples) -> Principal:
    return _with_adapter(request, principal)


def _with_adapter(request: Request, principal: Principal) -> Principal:
    """The caller, if it may see the adapter in the path.

    For a key that is restricted to other adapters it does not exist.
    """
    name = request.path_params.get("name")
    if name is not None and not principal.may_use(name):
        raise no_adapter(name)
    return principal


Reader = Annotated[Principal, Depends(_reader)]
Writer = Annotated[Principal, Depends(_writer)]
SampleReader = Annotated[Principal, Depends(_sample_reader)]
SampleWriter = Annotated[Principal, Depends(_sample_writer)]
NO_VERSION = ("adapter_not_found", "version_not_found")
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
        adapter = service.get_adapter(session, name)
        return FoundVersion(adapter, version_of(adapter, number))

    return await runtime.control_plane.read(principal.tenant_id, find)
