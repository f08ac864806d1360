"""The foundations of a server's services: its disk, the database, the store and the engine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import structlog

from ...adapters.disk_room import DiskRoom
from ...adapters.errors import StorageFull, StoreUnavailable
from ...adapters.fetcher_client import FetcherClient
from ...adapters.store import ObjectStore, check_usable
from ...engine.config import EngineConfig
from ...engine.fleet.certificates import api_certificates, api_context
from ...engine.fleet.fleet import Fleet
from ...engine.fleet.replica_view import ReplicaView
from ...engine.process.client import EngineClient
from ...engine.text.tokenizer import Tokenizer
from ...engine.token_journal import NUM_SLOTS, TokenJournal
from ...platform.database import Database
from ...platform.errors import InvalidValue, PlatformError
from ..control_plane.control_plane import ControlPlane
from ..control_plane.leases import Leases
from ..fleet.membership import Membership
from ..inference.seen_adapters import SeenAdapters
from ..inference.wanted_blocks import WantedBlocks
from ..settings import Settings
from ..tuning.trainer_place import trainer_cpus
from ..upkeep.disk_reserve import FILE as RESERVE_FILE
from ..upkeep.disk_reserve import open_reserve
from .bases import Bases, locate_bases, public_name
from .data_dir_lock import locked_data_dir
from .prefix_disk import open_prefix_disk
from .server_id import load_or_create_server_id

log = structlog.get_logger(__name__)

STORE_CHECK_SECONDS = 10.0
JOURNAL_FILE = "tokens.journal"
"""A file in the data folder; it outlives the server."""


@dataclass(frozen=True, slots=True)
class Planes:
    """The control plane, the data plane, and the parts that both use."""

    settings: Settings
    engine_config: EngineConfig
    server_id: str
    disk_room: DiskRoom
    control_plane: ControlPlane
    leases: Leases
    bases: Bases
    served_model_name: str
    tokenizer: Tokenizer
    journal: TokenJournal
    fetcher: FetcherClient
    seen_adapters: SeenAdapters
    blocks: WantedBlocks
    engine: EngineClient | Fleet
    membership: Membership | None
    """None: the engine is this server's own."""

    async def counts_devices(self) -> bool:
        """Whether this server counts what adapters hold on devices: each server of a fleet sees all
        replicas, but an engine of its own is seen by no other. Raises a PlatformError."""
        return self.membership is None or await self.leases.claim("device-usage")

    def fleet_views(self) -> list[ReplicaView]:
        """The replicas that this server uses; none if the engine is its own."""
        return self.engine.views() if isinstance(self.engine, Fleet) else []


async def open_planes(
    settings: Settings, engine_config: EngineConfig, stack: AsyncExitStack
) -> Planes:
    """Open all parts in order; `stack` closes them in reverse.

    Parts that fail because of a wrong setting are opened before the engine, which takes long to
    start. Raises DataDirInUse, or a PlatformError, EngineError or AdapterError.
    """
    disk_room = _open_data_dir(settings, stack)
    control_plane = _start_control_plane(settings, stack)
    bases = await asyncio.to_thread(locate_bases, settings, engine_config)
    tokenizer = await asyncio.to_thread(Tokenizer, bases.served)
    journal = await asyncio.to_thread(_open_journal, settings, engine_config)
    stack.callback(journal.close)
    fetcher = await _start_fetcher(settings, stack)
    seen_adapters = SeenAdapters(settings.stale_seconds)
    control_plane.tell_of_changes(seen_adapters.note_change)
    blocks = WantedBlocks(control_plane, fetcher, seen_adapters)
    located = _beside_trainers(settings, replace(engine_config, model=str(bases.served)))
    membership: Membership | None = None
    engine: EngineClient | Fleet
    disk = await open_prefix_disk(settings, located, control_plane)
    if settings.fleet_certificates is None:
        engine = await _start_engine(disk.config, blocks, fetcher, disk.key, stack)
    else:
        engine, membership = await _join_fleet(settings, located, blocks, control_plane, stack)
    server_id = load_or_create_server_id(settings.data_dir)
    return Planes(
        settings=settings,
        engine_config=engine_config,
        server_id=server_id,
        disk_room=disk_room,
        control_plane=control_plane,
        leases=Leases(control_plane, server_id),
        bases=bases,
        served_model_name=settings.served_model_name
        or public_name(engine_config.model, bases.served),
        tokenizer=tokenizer,
        journal=journal,
        fetcher=fetcher,
        seen_adapters=seen_adapters,
        blocks=blocks,
        engine=engine,
        membership=membership,
    )


def _beside_trainers(settings: Settings, config: EngineConfig) -> EngineConfig:
    """The configuration of an engine that leaves trainers on its machine what they take. Raises
    InvalidValue."""
    if not settings.tuning or settings.tuning_ray is not None:
        return config
    return replace(
        config,
        trainer_device=settings.tuning_device,
        trainer_bytes=settings.tuning_bytes or 0,
        trainer_cpus=trainer_cpus(settings),
    )


def _open_data_dir(settings: Settings, stack: AsyncExitStack) -> DiskRoom:
    """The room on the data folder's disk, without the reserve, which is maintained from now on.
    Raises DataDirInUse."""
    stack.enter_context(locked_data_dir(settings.prepare_data_dir()))
    reserve, disk_room = open_reserve(settings.data_dir, settings.disk_reserve_bytes)
    stack.push_async_callback(reserve.close)
    reserve.start()
    return disk_room


def _start_control_plane(settings: Settings, stack: AsyncExitStack) -> ControlPlane:
    control_plane = open_control_plane(settings)
    stack.callback(control_plane.close)
    control_plane.watch.start()
    stack.push_async_callback(control_plane.watch.close)
    return control_plane


def open_control_plane(settings: Settings) -> ControlPlane:
    """Only the embedded database is migrated. Raises a PlatformError if another database has an
    older schema."""
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
    """Open the journal, with room for the engine's queue and batch and for as many requests that
    wait for the database."""
    num_slots = max(NUM_SLOTS, 2 * (config.max_queued + config.max_num_seqs))
    return TokenJournal(settings.data_dir / JOURNAL_FILE, num_slots=num_slots)


async def _start_fetcher(settings: Settings, stack: AsyncExitStack) -> FetcherClient:
    """Raises InvalidValue or StoreDenied if the store is set up wrongly."""
    fetcher = FetcherClient(
        store_url=settings.store_url,
        cache_directory=settings.data_dir / "cache",
        capacity_bytes=settings.disk_cache_bytes,
        environment=settings.take_fetcher_environment(),
        reserve_bytes=settings.disk_reserve_bytes,
        reserve_file=settings.data_dir / RESERVE_FILE,
    )
    stack.push_async_callback(asyncio.to_thread, fetcher.close)
    try:
        await asyncio.to_thread(fetcher.start)
    except ValueError as exc:
        raise InvalidValue(str(exc), param="store") from exc
    await _check_store(fetcher.store)
    return fetcher


async def _check_store(store: ObjectStore) -> None:
    """Raise StoreDenied if the store is set up wrongly.

    A store that does not respond only delays adapters that are not on this machine: a restarted
    server serves what is on its disk. A full disk only prevents pushes.
    """
    try:
        async with asyncio.timeout(STORE_CHECK_SECONDS):
            await asyncio.to_thread(check_usable, store)
    except (StorageFull, StoreUnavailable, TimeoutError) as exc:
        reason = str(exc) or f"no answer within {STORE_CHECK_SECONDS:g} s"
        log.warning("adapter_store_unavailable_at_start", reason=reason)


async def _start_engine(
    config: EngineConfig,
    blocks: WantedBlocks,
    fetcher: FetcherClient,
    prefix_key: bytes,
    stack: AsyncExitStack,
) -> EngineClient:
    engine = EngineClient(
        config,
        on_adapter_wanted=blocks.fetch,
        on_adapter_read=fetcher.note_read,
        prefix_key=prefix_key,
    )
    stack.push_async_callback(engine.stop)
    await engine.start()
    return engine


async def _join_fleet(
    settings: Settings,
    config: EngineConfig,
    blocks: WantedBlocks,
    control_plane: ControlPlane,
    stack: AsyncExitStack,
) -> tuple[Fleet, Membership]:
    """Return when a replica is ready. Raises InvalidValue for unusable certificates."""
    assert settings.fleet_certificates is not None
    try:
        context = api_context(api_certificates(settings.fleet_certificates))
    except OSError as exc:
        raise InvalidValue(f"--fleet-certificates: {exc}", param="fleet_certificates") from exc
    fleet = Fleet(
        context=context,
        locate=blocks.locate,
        max_requests=config.max_queued + config.max_num_seqs,
    )
    stack.push_async_callback(fleet.stop)
    membership = Membership(fleet, control_plane, lease_seconds=settings.stale_seconds)
    await membership.add(settings.replica_addresses)
    membership.start()
    stack.push_async_callback(membership.close)
    log.info("waiting_for_replica")
    await fleet.start()
    return fleet, membership
