"""`loraplex agent`: serves a base model to the API servers of a fleet."""

from __future__ import annotations

import asyncio
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...adapters.errors import AdapterError
from ...engine.config import EngineConfig
from ...engine.kv.key_files import remove_folders
from ...engine.kv_policy import EvictionMethod
from ...engine.messages import ReplicaRole
from ...platform.replicas.address import parse_address
from ..settings import Settings
from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .output import note
from .serve_options import with_options
from .server_command import ServerCommand

if TYPE_CHECKING:
    from ...engine.fleet.agent import Agent, AgentEnd

app = typer.Typer(add_completion=False)

DEFAULT_ADDRESS = "127.0.0.1:7070"
SETTINGS = (*("data_dir", "store", "disk_cache_bytes", "drain_seconds", "log_level", "log_format"),)


@app.command(cls=ServerCommand)
@partial(with_options, settings=SETTINGS)
def agent(
    engine_config: EngineConfig,
    settings: Settings,
    *,
    context: typer.Context,
    certificates: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the agent's certificates.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where API servers connect; port 0: any.")
    ] = DEFAULT_ADDRESS,
    role: Annotated[
        ReplicaRole,
        typer.Option(
            help="prefill: computes long prompts for the decode replicas. decode: takes requests, "
            "and prefixes from the prefill replicas. both: takes requests and computes all itself."
        ),
    ] = ReplicaRole.BOTH,
) -> None:
    """Serve a base model to the API servers of a fleet until ^C or SIGTERM.

    Options are read from variables and a file as those of `loraplex serve`.

    It holds no tenant's keys and no database. It exits with 7 if its lease ended or its engine
    failed too often: start it again then.
    """
    need_engine("serving")
    try:
        host, port = parse_address(listen)
    except ValueError as exc:
        raise CommandFailed(f"--listen: {exc}") from exc
    _run(settings, engine_config, certificates, role, host=host, port=port)


def _run(
    settings: Settings,
    engine_config: EngineConfig,
    certificates: Path,
    role: ReplicaRole,
    *,
    host: str,
    port: int,
) -> None:
    from ...engine.fleet.agent import AgentEnd
    from ..server.data_dir_lock import DataDirInUse, locked_data_dir
    from ..telemetry.logs import configure_logging

    _check_role(role, engine_config)
    configure_logging(settings.log_level, settings.log_format)
    note(f"Loading {engine_config.model} ...")
    try:
        with locked_data_dir(settings.prepare_data_dir()):
            end = asyncio.run(_serve(settings, engine_config, certificates, role, host, port))
    except (AdapterError, DataDirInUse, OSError) as exc:
        raise CommandFailed(str(exc), ExitCode.UNAVAILABLE) from exc
    if end is not AgentEnd.STOPPED:
        raise CommandFailed(f"The agent has ended: {end}.", ExitCode.UNAVAILABLE)


def _check_role(role: ReplicaRole, engine_config: EngineConfig) -> None:
    """Raises CommandFailed if such an engine cannot have the role."""
    if role is not ReplicaRole.BOTH and engine_config.num_ranks > 1:
        raise CommandFailed(f"--role {role}: {engine_config.ranks_obstacle}")
    if role is ReplicaRole.DECODE and not engine_config.stores_kv_on_host:
        raise CommandFailed(
            "--role decode: needs --host-gib or --swap-gib, where prefixes are received"
        )
    policy = engine_config.default_kv_policy
    if role is not ReplicaRole.BOTH and policy and policy.method is EvictionMethod.H2O:
        raise CommandFailed(
            f"--role {role}: --kv-policy h2o computes every prompt where it decodes"
        )


async def _serve(
    settings: Settings,
    engine_config: EngineConfig,
    certificates: Path,
    role: ReplicaRole,
    host: str,
    port: int,
) -> AgentEnd:
    """Serve without the adapters and prefixes of an earlier life: what was deleted since may be
    among them."""
    from ...adapters.fetcher_client import FetcherClient
    from ...engine.fleet.agent import Agent
    from ...engine.fleet.certificates import agent_certificates, agent_context
    from ...engine.fleet.replica import Replica

    context = agent_context(agent_certificates(certificates))
    cache = settings.data_dir / "cache"
    prefixes = Path(engine_config.prefix_disk_dir or settings.data_dir / "prefixes")
    if engine_config.prefix_disk_bytes:
        engine_config = replace(engine_config, prefix_disk_dir=str(prefixes))
    shutil.rmtree(cache, ignore_errors=True)
    remove_folders(prefixes)
    fetcher = FetcherClient(
        store_url=settings.store_url,
        cache_directory=cache,
        capacity_bytes=settings.disk_cache_bytes,
        environment=settings.take_fetcher_environment(),
    )
    await asyncio.to_thread(fetcher.start)
    try:
        running = Agent(Replica(engine_config, fetcher=fetcher, role=role), context=context)
        _stop_at_signals(running, settings.drain_seconds)
        return await running.run(host, port, on_listening=partial(_announce, host))
    finally:
        await asyncio.to_thread(fetcher.close)
        shutil.rmtree(cache, ignore_errors=True)
        remove_folders(prefixes)


def _stop_at_signals(running: Agent, drain_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(running.stop, drain_seconds=drain_seconds))


def _announce(host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    note(f"Serving API servers at {shown}:{port}")
