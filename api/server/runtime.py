"""Everything that one serving process holds, wired together: the only place that knows both planes.

Opened before the first request and closed after the last.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import structlog
from fastapi import Depends
from starlette.requests import Request

from ...adapters.confinement_probe import ConfinementReport
from ...adapters.errors import ObjectNotFound, StorageFull, StoreUnavailable
from ...adapters.fetcher import BlockSource, FetchedBlock
from ...adapters.fetcher_client import FetcherClient, FetcherStats
from ...adapters.identity import AdapterKey
from ...adapters.layout import BaseLayout, layout_to_json
from ...adapters.store import ObjectStore, check_usable
from ...engine.checkpoint.files import check_drafts, locate_base
from ...engine.config import EngineConfig
from ...engine.messages import EngineInfo
from ...engine.process.client import EngineClient
from ...engine.text.tokenizer import Tokenizer
from ...engine.token_journal import NUM_SLOTS, TokenJournal
from ...platform.accounts import failures
from ...platform.adapters import repository, upload_upkeep
from ...platform.adapters.models import AdapterVersion
from ...platform.adapters.registry import AdapterRef
from ...platform.base import utc_now
from ...platform.database import Database
from ...platform.errors import DatabaseUnavailable, InvalidValue, PlatformError
from ...platform.idempotency import service as idempotency
from ...platform.idempotency.service import IdempotentAnswers
from ...platform.jobs import service as job_leases
from ...platform.overview import recent_requests
from ...platform.overview import service as samples
from ...platform.quotas import service as quotas
from ...platform.requests import upkeep as request_log
from ...platform.servers.service import ServerInfo
from ...platform.version import __version__
from ..adapters.attestation import Attestations
from ..adapters.deletions import Deletions
from ..adapters.downloads import Downloads
from ..adapters.lost_uploads import end_lost_uploads
from ..adapters.probes import PROBE_TEXT, probe_prompts
from ..adapters.pushes import Pushes
from ..adapters.quantization_contract import QuantizationContract, check_reference
from ..adapters.reconciliation import Reconciliation
from ..adapters.residency_usage import ResidencyUsage
from ..adapters.staging import Staging
from ..adapters.staging_budget import STAGING_PART, StagingBudget
from ..adapters.upload_room import UploadRoom
from ..control_plane.control_plane import ControlPlane
from ..control_plane.jobs import Job, Jobs
from ..control_plane.leases import Leases
from ..control_plane.presence import Presence
from ..control_plane.refusals import Refusals
from ..control_plane.sign_in import SignIn
from ..inference.admission import Admission
from ..inference.inference import Inference
from ..inference.ledger_writer import LedgerWriter
from ..inference.metering import Metering
from ..inference.seen_adapters import SeenAdapters
from ..settings import Settings
from ..telemetry.memories import Memories
from ..telemetry.metrics import Metrics
from ..telemetry.overview import Overview
from ..telemetry.request_log import RequestLog
from ..telemetry.tracing import Tracing, open_tracing
from ..upkeep.disk_reserve import FILE as RESERVE_FILE
from ..upkeep.disk_reserve import open_reserve
from ..upkeep.expiring_keys import ExpiringKeys
from ..upkeep.garbage import Garbage
from .confinement import check_confinement
from .data_dir_lock import DataDirInUse, locked_data_dir
from .readiness import Readiness
from .server_id import load_or_create_server_id

log = structlog.get_logger(__name__)

STORE_CHECK_SECONDS = 10.0
JOURNAL_FILE = "tokens.journal"
"""In the data folder: it outlives the server."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The services that routes use."""

    settings: Settings
    engine_config: EngineConfig
    engine: EngineClient
    readiness: Readiness
    confinement: ConfinementReport
    control_plane: ControlPlane
    inference: Inference
    pushes: Pushes
    deletions: Deletions
    downloads: Downloads
    reconciliation: Reconciliation
    idempotent_answers: IdempotentAnswers
    request_log: RequestLog
    refusals: Refusals
    sign_in: SignIn
    memories: Memories
    overview: Overview
    fetcher_stats: Callable[[], FetcherStats]
    metrics: Metrics
    started_at: int
    """Seconds since 1970."""
    tracing: Tracing | None


async def current_runtime(request: Request) -> Runtime:
    """The runtime of the app that this request came to.

    A coroutine, or FastAPI would ask a thread for it with every request.
    """
    runtime: Runtime = request.app.state.runtime
    return runtime


CurrentRuntime = Annotated[Runtime, Depends(current_runtime)]


@asynccontextmanager
async def open_runtime(settings: Settings, engine_config: EngineConfig) -> AsyncIterator[Runtime]:
    """Start everything; what an earlier run left unfinished is taken up.

    Raises DataDirInUse, or a PlatformError, EngineError or AdapterError if a part cannot start.
    """
    async with AsyncExitStack() as stack:
        tracing = open_tracing(is_wanted=settings.otel, environment=settings.telemetry_environment)
        if tracing:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        confinement = await check_confinement(is_required=settings.require_confinement)
        stack.enter_context(locked_data_dir(settings.prepare_data_dir()))
        reserve, disk_room = open_reserve(settings.data_dir, settings.disk_reserve_bytes)
        stack.push_async_callback(reserve.close)
        reserve.start()
        control_plane = _open_control_plane(settings)
        stack.callback(control_plane.close)
        control_plane.watch.start()
        stack.push_async_callback(control_plane.watch.close)
        bases = await asyncio.to_thread(_locate_bases, settings, engine_config)
        tokenizer = await asyncio.to_thread(Tokenizer, bases.served)
        journal = await asyncio.to_thread(_open_journal, settings, engine_config)
        stack.callback(journal.close)
        fetcher = FetcherClient(
            store_url=settings.store_url,
            cache_directory=settings.data_dir / "cache",
            capacity_bytes=settings.disk_cache_bytes,
            environment=settings.take_fetcher_environment(),
            reserve_bytes=settings.disk_reserve_bytes,
            reserve_file=settings.data_dir / RESERVE_FILE,
        )
        stack.push_async_callback(asyncio.to_thread, fetcher.close)
        await asyncio.to_thread(_start_fetcher, fetcher)
        await _check_store(fetcher.store)
        seen_adapters = SeenAdapters(settings.stale_seconds)
        control_plane.tell_of_changes(seen_adapters.note_change)
        source = _BlockSource(control_plane, fetcher, seen_adapters)
        engine = EngineClient(
            replace(engine_config, model=str(bases.served)),
            on_adapter_wanted=source.fetch,
            on_adapter_read=fetcher.note_read,
            journal=journal,
        )
        stack.push_async_callback(engine.stop)
        await engine.start()

        name = settings.served_model_name or _public_name(engine_config.model, bases.served)
        metrics = Metrics(lambda: engine.stats, fetcher.stats)
        ledger = LedgerWriter(control_plane)
        metering = Metering(journal=journal, engine=engine, ledger=ledger, metrics=metrics)
        stack.push_async_callback(metering.close)
        metrics.show_ledger(
            is_database_away=lambda: control_plane.watch.is_away,
            num_unsettled=lambda: metering.num_unsettled,
        )
        server_id = load_or_create_server_id(settings.data_dir)
        leases = Leases(control_plane, server_id)
        admission = Admission(control_plane, ledger, server_id, is_open=metering.is_open)
        memories = Memories(
            engine=engine,
            disk_stats=lambda: fetcher.stats().disk,
            cache_directory=settings.data_dir / "cache",
            control_plane=control_plane,
            server_id=server_id,
        )
        overview = Overview(control_plane, memories, server_id)
        stack.push_async_callback(overview.close)
        stack.push_async_callback(admission.close)
        inference = Inference(
            engine=engine,
            tokenizer=tokenizer,
            control_plane=control_plane,
            metering=metering,
            seen_adapters=seen_adapters,
            admission=admission,
            metrics=metrics,
            tenant_figures=overview.of_tenant,
            served_model_name=name,
            adapter_wait_seconds=settings.adapter_wait_seconds,
            tool_format=settings.tool_format,
        )
        stack.push_async_callback(inference.aclose)
        prompts = probe_prompts(tokenizer.encode(PROBE_TEXT), engine.info.vocab_size)
        attestations = Attestations(
            engine=engine,
            control_plane=control_plane,
            prompts=prompts,
            leases=leases,
            contract=await asyncio.to_thread(
                _open_contract,
                settings,
                engine_config,
                bases.reference,
                engine.info,
                prompts,
                source,
            ),
        )
        stack.push_async_callback(attestations.close)
        staging = Staging(settings.data_dir / "uploads", disk_room)
        upload_room = _open_upload_room(
            settings, staging, control_plane=control_plane, fetcher=fetcher, server_id=server_id
        )
        metrics.show_disk(
            free_bytes=lambda: disk_room.free_bytes,
            held_bytes=lambda: upload_room.budget.held_bytes,
            total_bytes=upload_room.budget.total_bytes,
        )
        pushes = Pushes(
            info=engine.info,
            layout_path=_write_layout(settings.data_dir, engine.info.layout),
            staging=staging,
            room=upload_room,
            store=fetcher.store,
            control_plane=control_plane,
            attestations=attestations,
            served_model_name=name,
            server_id=server_id,
            max_full_matrix_bytes=settings.max_full_matrix_bytes,
            note_stored=engine.note_stored,
            is_store_here=settings.store is None,
        )
        stack.push_async_callback(pushes.close)
        garbage = Garbage(store=fetcher.store, staging=staging, control_plane=control_plane)
        stack.push_async_callback(garbage.close)
        reconciliation = Reconciliation(engine=engine, control_plane=control_plane)
        stack.push_async_callback(reconciliation.close)
        deletions = Deletions(
            engine=engine,
            fetcher=fetcher,
            store=fetcher.store,
            control_plane=control_plane,
            leases=leases,
        )
        stack.push_async_callback(deletions.close)
        downloads = Downloads(settings.data_dir / "exports", source.fetch, disk_room)
        stack.callback(downloads.close)

        presence = Presence(_describe_server(server_id, engine.info), control_plane)
        stack.push_async_callback(presence.close)
        residency_usage = ResidencyUsage(lambda: engine.stats, control_plane)
        stack.push_async_callback(residency_usage.close)
        expiring_keys = ExpiringKeys(control_plane=control_plane, metrics=metrics)
        stack.push_async_callback(expiring_keys.close)

        idempotent_answers = IdempotentAnswers(settings.load_secrets(), server_id)
        jobs = Jobs(leases, _upkeep(settings, control_plane, garbage))
        stack.push_async_callback(jobs.close)

        sign_in = SignIn(control_plane, settings.load_secrets()[0])
        stack.push_async_callback(sign_in.aclose)
        request_log = RequestLog(control_plane, metrics)
        stack.push_async_callback(request_log.close)
        refusals = Refusals(control_plane)
        stack.push_async_callback(refusals.close)
        started_at = int(time.time())
        await metering.recover()
        await admission.sweep()
        admission.start()
        await control_plane.write_all_tenants(idempotent_answers.recover)
        await presence.start()
        residency_usage.start()
        overview.start()
        attestations.start()
        await garbage.sweep_at_start()
        for service in (pushes, attestations, deletions):
            await service.recover()
        upload_room.start()
        reconciliation.start()
        request_log.start()
        refusals.start()
        garbage.start()
        jobs.start()
        expiring_keys.start()
        yield Runtime(
            settings=settings,
            engine_config=engine_config,
            engine=engine,
            readiness=Readiness(engine),
            confinement=confinement,
            control_plane=control_plane,
            inference=inference,
            pushes=pushes,
            deletions=deletions,
            downloads=downloads,
            reconciliation=reconciliation,
            idempotent_answers=idempotent_answers,
            request_log=request_log,
            refusals=refusals,
            sign_in=sign_in,
            memories=memories,
            overview=overview,
            fetcher_stats=fetcher.stats,
            metrics=metrics,
            started_at=started_at,
            tracing=tracing,
        )


class _BlockSource:
    """Brings the adapters that the engine wants to this machine's disk."""

    def __init__(
        self, control_plane: ControlPlane, fetcher: BlockSource, seen_adapters: SeenAdapters
    ) -> None:
        self._control_plane = control_plane
        self._fetcher = fetcher
        self._seen_adapters = seen_adapters

    async def fetch(self, key: AdapterKey) -> FetchedBlock:
        """The verified block. Raises an AdapterError or PlatformError."""
        version: AdapterVersion | AdapterRef | None
        try:
            version = await self._control_plane.read(
                key.tenant_id, lambda session: repository.find_content(session, key.digest)
            )
        except DatabaseUnavailable:
            version = self._seen_adapters.recall_content(key)
        if version is None:
            raise ObjectNotFound("no version has this content any more")
        return await asyncio.wrap_future(
            self._fetcher.fetch(key, sha256=version.object_sha256, size_bytes=version.size_bytes)
        )


def _upkeep(settings: Settings, control_plane: ControlPlane, garbage: Garbage) -> list[Job]:
    """What one of the servers does from time to time."""

    async def purge_request_log() -> None:
        before = utc_now() - timedelta(days=settings.request_log_days)
        while await control_plane.write_all_tenants(
            lambda session: request_log.purge(session, before)
        ):
            pass

    async def purge_uploads() -> None:
        before = utc_now() - timedelta(days=settings.upload_days)
        while await control_plane.write_all_tenants(
            lambda session: upload_upkeep.purge(session, before)
        ):
            pass

    async def end_uploads() -> None:
        await end_lost_uploads(control_plane)

    async def purge_answers() -> None:
        await control_plane.write_all_tenants(idempotency.purge)

    async def purge_samples() -> None:
        await control_plane.write_all_tenants(lambda session: samples.purge(session, time.time()))

    async def count_requests() -> None:
        for tenant_id in await control_plane.read_all_tenants(recent_requests.users):
            await control_plane.write_all_tenants(
                partial(recent_requests.recount, tenant_id=tenant_id)
            )

    async def purge_sign_ins() -> None:
        await control_plane.write_all_tenants(control_plane.accounts.purge)
        await control_plane.write_all_tenants(lambda session: failures.purge(session, utc_now()))

    async def purge_reservations() -> None:
        await control_plane.write_all_tenants(quotas.purge)

    async def purge_leases() -> None:
        await control_plane.write_all_tenants(job_leases.purge)

    return [
        Job(name="garbage", every=timedelta(days=1), run=garbage.collect_shared),
        Job(name="lost-uploads", every=timedelta(minutes=5), run=end_uploads),
        Job(name="closed-uploads", every=timedelta(hours=1), run=purge_uploads),
        Job(name="request-log", every=timedelta(hours=1), run=purge_request_log),
        Job(name="idempotent-answers", every=timedelta(hours=1), run=purge_answers),
        Job(name="samples", every=timedelta(hours=1), run=purge_samples),
        Job(name="recent-requests", every=timedelta(hours=6), run=count_requests),
        Job(name="sign-ins", every=timedelta(hours=1), run=purge_sign_ins),
        Job(name="reservations", every=timedelta(days=1), run=purge_reservations),
        Job(name="leases", every=timedelta(days=1), run=purge_leases),
    ]


class _Bases(NamedTuple):
    """The folders of the base models, their files checked."""

    served: Path
    reference: Path | None


def _locate_bases(settings: Settings, engine_config: EngineConfig) -> _Bases:
    """Check all models that will be loaded, before anything that takes time.

    Raises InvalidValue, or UnsupportedModel with what is wrong with one of them.
    """
    if settings.max_reference_kl is not None and settings.reference_base is None:
        raise InvalidValue("--max-reference-kl needs --reference-base.", param="max_reference_kl")
    served = locate_base(engine_config.model)
    reference = settings.reference_base
    check_drafts(engine_config.speculation)
    return _Bases(served, None if reference is None else locate_base(reference))


def _open_contract(
    settings: Settings,
    engine_config: EngineConfig,
    reference_dir: Path | None,
    info: EngineInfo,
    prompts: list[list[int]],
    source: _BlockSource,
) -> QuantizationContract | None:
    """The contract with the reference base, if the operator gave one. Raises InvalidValue."""
    if reference_dir is None:
        return None
    check_reference(reference_dir, info.base_id)
    return QuantizationContract(
        reference_dir=reference_dir,
        base_id=info.base_id,
        prompts=prompts,
        fetch=source.fetch,
        limit=settings.max_reference_kl,
        num_threads=engine_config.num_threads,
    )


def _start_fetcher(fetcher: FetcherClient) -> None:
    try:
        fetcher.start()
    except ValueError as exc:
        raise InvalidValue(str(exc), param="store") from exc


async def _check_store(store: ObjectStore) -> None:
    """Raise StoreDenied if the store is set up wrongly.

    One that does not answer only delays what is cold: a server that restarts while its store is
    away serves what is on its disk. A full disk stops pushes alone.
    """
    try:
        async with asyncio.timeout(STORE_CHECK_SECONDS):
            await asyncio.to_thread(check_usable, store)
    except (StorageFull, StoreUnavailable, TimeoutError) as exc:
        reason = str(exc) or f"no answer within {STORE_CHECK_SECONDS:g} s"
        log.warning("adapter_store_unavailable_at_start", reason=reason)


def _public_name(model: str, model_dir: Path) -> str:
    """A folder's name, or the hub id as it was given."""
    return model_dir.name if Path(model).expanduser().is_dir() else model


def _open_upload_room(
    settings: Settings,
    staging: Staging,
    *,
    control_plane: ControlPlane,
    fetcher: FetcherClient,
    server_id: str,
) -> UploadRoom:
    """The budget of uploads beside the disk cache, which is left as much as the reserve."""
    room = staging.room
    cache_bytes = min(room.reserve_bytes, settings.disk_cache_bytes)

    def free_bytes() -> int:
        return room.free_bytes - max(0, cache_bytes - fetcher.stats().disk.used_bytes)

    total = settings.staging_bytes
    budget = StagingBudget(
        total_bytes=room.total_bytes // STAGING_PART if total is None else total,
        tenant_bytes=settings.staging_tenant_bytes,
        free_bytes=free_bytes,
        written_bytes=staging.num_bytes,
    )
    return UploadRoom(
        budget=budget,
        staging=staging,
        control_plane=control_plane,
        server_id=server_id,
        trim_cache=lambda num_bytes: fetcher.trim(num_bytes, keep_bytes=cache_bytes),
    )


def _write_layout(data_dir: Path, layout: BaseLayout) -> Path:
    """The base's layout as a file, for the intake processes; another base's is another file."""
    content = layout_to_json(layout).encode()
    path = data_dir / f"layout-{hashlib.sha256(content).hexdigest()}.json"
    if path.exists() and path.read_bytes() == content:
        return path  # also on a full disk
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(content)
    return unfinished.replace(path)


def _open_control_plane(settings: Settings) -> ControlPlane:
    database = Database(settings.database_url)
    try:
        if settings.is_database_embedded:
            database.upgrade()
        database.check_revision()
        secrets = settings.load_secrets()
    except PlatformError:
        database.close()
        raise
    return ControlPlane(database, *secrets, stale_seconds=settings.stale_seconds)


def _open_journal(settings: Settings, config: EngineConfig) -> TokenJournal:
    """As large as the engine's queue at least, and as much again for what waits for the database.

    Raises DataDirInUse if an earlier server's engine does not end.
    """
    num_slots = max(NUM_SLOTS, 2 * (config.max_queued + config.max_num_seqs))
    try:
        return TokenJournal(settings.data_dir / JOURNAL_FILE, num_slots=num_slots)
    except TimeoutError:
        raise DataDirInUse(settings.data_dir) from None


def _describe_server(server_id: str, info: EngineInfo) -> ServerInfo:
    return ServerInfo(
        id=server_id,
        name=socket.gethostname(),
        version=__version__,
        base_id=info.base_id,
        started_at=utc_now(),
    )
