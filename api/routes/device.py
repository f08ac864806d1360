"""`/admin/residency`: the adapters in this server's memory, and its usage."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ...adapters.manager import Tier
from ...engine.errors import EngineUnavailable
from ...engine.messages import EngineStats
from ...platform.adapters import repository
from ...platform.keys.principal import OperatorPrincipal, OperatorRole
from ..contract.promises import answers
from ..control_plane.tenant_names import tenant_names
from ..http.auth import require_operator
from ..http.json_response import json_response
from ..schemas.device import ConnectedReplicaView, ResidencyView, ResidentView, TierView
from ..schemas.memory_tiers import BorderView, PrefixTierView
from ..schemas.ranks import RankView
from ..server.runtime import CurrentRuntime, Runtime
from .replica_views import connection_view

router = APIRouter(prefix="/admin")

Operator = Annotated[
    OperatorPrincipal, Depends(require_operator(OperatorRole.ADMIN, OperatorRole.VIEWER))
]


@router.get("/residency")
@answers(ResidencyView, errors=("engine_unavailable",))
async def get_residency(runtime: CurrentRuntime, operator: Operator) -> Response:
    """The adapters and memory of this server's engine, from its last report (two per second)."""
    stats = runtime.engine.stats
    if stats is None:
        raise EngineUnavailable
    return json_response(
        ResidencyView(
            data=await _residents(runtime, stats),
            tiers=_tiers(runtime, stats),
            fragmentation=stats.adapter_tiers.fragmentation,
            num_leases=stats.adapter_tiers.num_leases,
            pinned_bytes=stats.adapter_tiers.pinned_bytes,
            kv_usage=stats.kv_usage,
            device_busy=stats.utilization.busy,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            ranks=list(map(RankView.of, stats.ranks)),
            prefixes=PrefixTierView.tiers_of(stats),
            border=BorderView.of(stats),
            replicas=[
                ConnectedReplicaView(each.address, connection_view(each))
                for each in runtime.fleet_views()
            ],
        )
    )


async def _residents(runtime: Runtime, stats: EngineStats) -> list[ResidentView]:
    parts = {part for entry in stats.adapters for part in entry.key.parts}
    contents = {(part.tenant_id, part.digest) for part in parts}
    slugs = await tenant_names(runtime.control_plane, {part.tenant_id for part in parts})
    names = await runtime.control_plane.read_all_tenants(
        lambda session: repository.names_of(session, contents)
    )
    return [
        ResidentView(
            tenant=slugs.get(entry.key.tenant_id, ""),
            digest=entry.key.digest,
            versions=[
                name
                for part in entry.key.parts
                for name in names.get((part.tenant_id, part.digest), [])
            ],
            tier=entry.tier,
            device_bytes=entry.device_bytes,
            num_leases=entry.num_leases,
        )
        for entry in stats.adapters
    ]


def _tiers(runtime: Runtime, stats: EngineStats) -> list[TierView]:
    info, held = runtime.engine.info, stats.adapter_tiers.bytes_by_tier
    disk = runtime.fetcher_stats().disk
    arena_bytes = stats.arena_bytes or info.arena_bytes  # before the first snapshot none is known
    return [
        TierView(Tier.DEVICE, held.get(Tier.DEVICE, 0), arena_bytes),
        TierView(Tier.HOST, held.get(Tier.HOST, 0), info.host_cache_bytes),
        TierView(Tier.DISK, disk.used_bytes, disk.capacity_bytes),
    ]
