"""`/admin/replicas`: the replicas of a fleet, for operators without a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from ...platform.audit.event import Changed, Event
from ...platform.jobs.service import shared_now
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ...platform.replicas import service
from ...platform.replicas.models import Replica
from ...platform.sessions import PlatformSession
from ..contract.promises import answers
from ..http.auth import origin_of, require_operator
from ..http.bodies import json_body
from ..http.json_response import json_response
from ..schemas.adapters import ListView
from ..schemas.replicas import FleetReplicaView, ReplicaBody
from ..server.runtime import CurrentRuntime, Runtime
from .replica_views import Views, replica_view

router = APIRouter(prefix="/admin/replicas")

Reader = Annotated[OperatorPrincipal, Depends(require_operator(*OperatorRole))]
Writer = Annotated[OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN))]


@router.get("")
@answers(ListView[FleetReplicaView])
async def list_replicas(runtime: CurrentRuntime, operator: Reader) -> Response:
    """List the fleet's replicas in the order in which they were added.

    `connection` is what the answering server sees; other servers have connections of their own.
    """
    views = _views(runtime)

    def read(session: PlatformSession) -> list[FleetReplicaView]:
        now = shared_now(session)
        return [replica_view(row, now, views) for row in service.list_replicas(session)]

    return json_response(ListView(await runtime.control_plane.read_all_tenants(read)))


@router.post("")
@answers(FleetReplicaView, 201)
async def add_replica(
    request: Request,
    runtime: CurrentRuntime,
    operator: Writer,
    body: Annotated[ReplicaBody, Depends(json_body(ReplicaBody))],
) -> Response:
    """Add the replica whose agent listens at an address.

    API servers connect to it within seconds. A known address returns the replica that has it.
    """
    views = _views(runtime)

    def add(session: PlatformSession) -> Changed[FleetReplicaView]:
        is_known = _has_address(service.list_replicas(session), body.address)
        row = service.add(session, body.address)
        event = None if is_known else Event("replica.add", row.id, {"address": row.address})
        return Changed(replica_view(row, shared_now(session), views), event)

    view = await runtime.control_plane.change_platform(origin_of(request, operator), add)
    return json_response(view, status_code=201)


@router.delete("/{replica_id}")
@answers(FleetReplicaView, errors=("replica_not_found",))
async def remove_replica(
    request: Request, runtime: CurrentRuntime, operator: Writer, replica_id: str
) -> Response:
    """Remove a replica; returns it.

    API servers leave it within seconds, and its agent ends when its lease does. Drain the replica
    first: requests that it still runs end with `engine_restarted`. Deletions no longer wait for it.
    """
    views = _views(runtime)

    def remove(session: PlatformSession) -> Changed[FleetReplicaView]:
        row = service.remove(session, replica_id)
        event = Event("replica.remove", row.id, {"address": row.address})
        return Changed(replica_view(row, shared_now(session), views), event)

    view = await runtime.control_plane.change_platform(origin_of(request, operator), remove)
    return json_response(view)


@router.post("/{replica_id}/drain")
@answers(FleetReplicaView, errors=("replica_not_found",))
async def drain_replica(
    request: Request, runtime: CurrentRuntime, operator: Writer, replica_id: str
) -> Response:
    """Send the replica no further requests.

    API servers follow within seconds; its open requests finish. The request can be repeated.
    """
    return await _set_draining(request, runtime, operator, replica_id, is_draining=True)


@router.post("/{replica_id}/resume")
@answers(FleetReplicaView, errors=("replica_not_found",))
async def resume_replica(
    request: Request, runtime: CurrentRuntime, operator: Writer, replica_id: str
) -> Response:
    """Send a drained replica requests again.

    API servers follow within seconds. The request can be repeated.
    """
    return await _set_draining(request, runtime, operator, replica_id, is_draining=False)


async def _set_draining(
    request: Request,
    runtime: Runtime,
    operator: OperatorPrincipal,
    replica_id: str,
    *,
    is_draining: bool,
) -> Response:
    views = _views(runtime)

    def change(session: PlatformSession) -> Changed[FleetReplicaView]:
        rows = {row.id: row.is_draining for row in service.list_replicas(session)}
        row = service.set_draining(session, replica_id, is_draining)
        action = "replica.drain" if is_draining else "replica.resume"
        was_so = rows.get(row.id) == is_draining
        event = None if was_so else Event(action, row.id, {"address": row.address})
        return Changed(replica_view(row, shared_now(session), views), event)

    view = await runtime.control_plane.change_platform(origin_of(request, operator), change)
    return json_response(view)


def _views(runtime: Runtime) -> Views:
    return {view.id: view for view in runtime.fleet_views()}


def _has_address(rows: Sequence[Replica], address: str) -> bool:
    return any(row.address == address for row in rows)
