"""The services that receive, check, hand out and remove adapters."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from ...engine.text.tokenizer import Tokenizer
from ..adapters.attestation import Attestations
from ..adapters.deletions import Deletions
from ..adapters.downloads import Downloads
from ..adapters.layout_file import write_layout
from ..adapters.probes import PROBE_TEXT, probe_prompts
from ..adapters.pushes import Pushes
from ..adapters.quantization_contract import QuantizationContract, check_reference
from ..adapters.reconciliation import Reconciliation
from ..adapters.staging import Staging
from ..adapters.staging_budget import STAGING_PART, StagingBudget
from ..adapters.upload_room import UploadRoom
from ..telemetry.metrics import Metrics
from ..upkeep.garbage import Garbage
from ..upkeep.tenant_deletions import TenantDeletions
from .planes import Planes


@dataclass(frozen=True, slots=True)
class AdapterServices:
    attestations: Attestations
    upload_room: UploadRoom
    pushes: Pushes
    garbage: Garbage
    reconciliation: Reconciliation
    deletions: Deletions
    downloads: Downloads
    tenant_deletions: TenantDeletions


async def open_adapters(planes: Planes, metrics: Metrics, stack: AsyncExitStack) -> AdapterServices:
    """Nothing of it runs yet; `stack` closes it. Raises InvalidValue for a wrong reference base."""
    engine, control_plane, store = planes.engine, planes.control_plane, planes.fetcher.store
    attestations = await _open_attestations(planes)
    stack.push_async_callback(attestations.close)
    staging = Staging(planes.settings.data_dir / "uploads", planes.disk_room)
    upload_room = _open_upload_room(planes, staging, metrics)
    pushes = _open_pushes(planes, staging, upload_room, attestations)
    stack.push_async_callback(pushes.close)
    garbage = Garbage(
        store=store,
        staging=staging,
        control_plane=control_plane,
        batch_days=planes.settings.file_days,
    )
    stack.push_async_callback(garbage.close)
    reconciliation = Reconciliation(engine=engine, control_plane=control_plane)
    stack.push_async_callback(reconciliation.close)
    deletions = Deletions(
        engine=engine,
        fetcher=planes.fetcher,
        store=store,
        control_plane=control_plane,
        leases=planes.leases,
    )
    stack.push_async_callback(deletions.close)
    tenant_deletions = TenantDeletions(
        control_plane=control_plane,
        leases=planes.leases,
        deletions=deletions,
        pushes=pushes,
        store=store,
    )
    stack.push_async_callback(tenant_deletions.close)
    exports = planes.settings.data_dir / "exports"
    downloads = Downloads(exports, planes.blocks.fetch, planes.disk_room)
    stack.callback(downloads.close)
    return AdapterServices(
        attestations,
        upload_room,
        pushes,
        garbage,
        reconciliation,
        deletions,
        downloads,
        tenant_deletions,
    )


async def _open_attestations(planes: Planes) -> Attestations:
    prompts = probe_prompts(planes.tokenizer.encode(PROBE_TEXT), planes.engine.info.vocab_size)
    return Attestations(
        engine=planes.engine,
        control_plane=planes.control_plane,
        prompts=prompts,
        leases=planes.leases,
        contract=await asyncio.to_thread(_open_contract, planes, prompts),
    )


def _open_contract(planes: Planes, prompts: list[list[int]]) -> QuantizationContract | None:
    """The contract with the reference base, if the operator gave one. Raises InvalidValue."""
    bases, base_id = planes.bases, planes.engine.info.base_id
    if bases.reference is None:
        return None
    return QuantizationContract(
        reference_dir=bases.reference,
        reference_id=check_reference(bases.reference, bases.served, base_id),
        base_id=base_id,
        prompts=prompts,
        fetch=planes.blocks.fetch,
        limit=planes.settings.max_reference_kl,
        num_threads=planes.engine_config.num_threads,
    )


def _open_upload_room(planes: Planes, staging: Staging, metrics: Metrics) -> UploadRoom:
    """The budget of uploads beside the disk cache, which is left as much as the reserve."""
    settings, fetcher, disk_room = planes.settings, planes.fetcher, planes.disk_room
    cache_bytes = min(disk_room.reserve_bytes, settings.disk_cache_bytes)

    def free_bytes() -> int:
        return disk_room.free_bytes - max(0, cache_bytes - fetcher.stats().disk.used_bytes)

    total = settings.staging_bytes
    budget = StagingBudget(
        total_bytes=disk_room.total_bytes // STAGING_PART if total is None else total,
        tenant_bytes=settings.staging_tenant_bytes,
        free_bytes=free_bytes,
        written_bytes=staging.num_bytes,
    )
    metrics.show_disk(
        free_bytes=lambda: disk_room.free_bytes,
        held_bytes=lambda: budget.held_bytes,
        total_bytes=budget.total_bytes,
    )
    return UploadRoom(
        budget=budget,
        staging=staging,
        control_plane=planes.control_plane,
        server_id=planes.server_id,
        trim_cache=lambda num_bytes: fetcher.trim(num_bytes, keep_bytes=cache_bytes),
    )


def _open_pushes(
    planes: Planes, staging: Staging, upload_room: UploadRoom, attestations: Attestations
) -> Pushes:
    engine, settings = planes.engine, planes.settings
    return Pushes(
        info=engine.info,
        layout_path=write_layout(settings.data_dir, engine.info.layout),
        staging=staging,
        room=upload_room,
        store=planes.fetcher.store,
        control_plane=planes.control_plane,
        attestations=attestations,
        served_model_name=planes.served_model_name,
        server_id=planes.server_id,
        max_full_matrix_bytes=settings.max_full_matrix_bytes,
        open_tokenizer=partial(Tokenizer, planes.bases.served),
        note_stored=engine.note_stored,
        is_store_here=settings.store is None,
    )
