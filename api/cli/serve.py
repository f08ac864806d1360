"""`loraplex serve`: serves a base model, its adapters and the API."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ...adapters.errors import AdapterError, ConfinementMissing
from ...engine.config import EngineConfig
from ..client.connection import DEFAULT_URL
from ..server.running_servers import registered
from ..settings import Settings, default_data_dir
from .admin import describe_running_server, naming_the_database
from .engine_extra import need_engine
from .exit_codes import CommandFailed, ExitCode
from .output import note
from .serve_on_ray import RayReplicas, bring_up, find_replicas
from .serve_options import with_options
from .server_command import ServerCommand
from .speculation import describe_speculation

if TYPE_CHECKING:
    from ..server.runtime import Runtime

app = typer.Typer(add_completion=False)


@app.command(cls=ServerCommand)
@with_options
def serve(
    engine_config: EngineConfig,
    settings: Settings,
    *,
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")
    ] = 8000,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of replicas that Ray starts, unless the fleet is up already. They outlive "
            "the server: `loraplex fleet down` ends them.",
            show_default="none",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the Ray cluster of --replicas, or `auto`. Needs --fleet-certificates.",
            show_default="none",
        ),
    ] = None,
    num_gpus: Annotated[
        float, typer.Option(min=0, help="GPUs that Ray reserves for each of --replicas.")
    ] = 0,
) -> None:
    """Serve a base model and its tenants' adapters until ^C or SIGTERM.

    Each option but --config is also a variable and a key of the --config file: --max-num-seqs is
    LORAPLEX_MAX_NUM_SEQS and max-num-seqs. An option takes precedence over the variable, the
    variable over the file, the file over the default.

    With --replicas and --ray it first starts a fleet as `loraplex fleet up` does, with the same
    model and engine options, or joins the one that is up, and serves when a replica is ready.
    """
    if settings.fleet_certificates is None:  # replicas of a fleet have engines of their own
        need_engine("serving")
    wanted = find_replicas(context, replicas, ray, num_gpus)
    _run(settings, engine_config, host=host, port=port, replicas=wanted)


def _run(
    settings: Settings,
    engine_config: EngineConfig,
    *,
    host: str,
    port: int,
    replicas: RayReplicas | None,
) -> None:
    from ..serve import (
        CannotListen,
        CannotUseCertificate,
        address,
        bind,
        check_certificate,
        run_server,
    )
    from ..server.data_dir_lock import DataDirInUse
    from ..telemetry.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    try:
        check_certificate(settings)
        listener = bind(host, port)
        scheme = "http" if settings.ssl_certfile is None else "https"
        url = f"{scheme}://{address(host, listener.getsockname()[1])}"
        note(f"Loading {engine_config.model} ...")
        with listener, naming_the_database(settings), ExitStack() as registration:

            def announce(runtime: Runtime) -> None:
                running = describe_running_server(settings, url)
                registration.enter_context(registered(running))
                _announce(runtime, url)

            if replicas is not None:
                bring_up(replicas, settings)
            run_server(
                settings,
                engine_config,
                listener=listener,
                announce=announce,
                on_drain=lambda seconds: note(
                    f"Stopping: waiting up to {seconds:g} s for running requests."
                ),
            )
    except ConfinementMissing as exc:
        raise CommandFailed(f"{exc} ({exc.code})") from exc
    except CannotUseCertificate as exc:
        raise CommandFailed(str(exc)) from exc
    except (AdapterError, CannotListen, DataDirInUse, OSError) as exc:
        raise CommandFailed(str(exc), ExitCode.UNAVAILABLE) from exc


def _announce(runtime: Runtime, url: str) -> None:
    for line in runtime.engine.info.memory_plan:
        note(f"  {line}")
    for line in runtime.tuning.memory_lines if runtime.tuning else ():
        note(f"  {line}")
    note(describe_speculation(runtime.engine.info))
    note(f"Serving {runtime.inference.served_model_name} at {url}/v1")
    note(f"Its console: {url}/console/")
    for line in next_steps(runtime.settings, url):
        note(line)


def next_steps(settings: Settings, url: str) -> list[str]:
    """What to do once it serves, with the options that another terminal needs."""
    where = ""
    if settings.data_dir != default_data_dir():
        where += f" --data-dir {shlex.quote(str(settings.data_dir))}"
    if settings.database is not None:
        where += " --database ..."  # not shown: it may hold a password
    server = "" if url == DEFAULT_URL else f" --url {url}"
    named = "" if url == DEFAULT_URL else f"LORAPLEX_URL={shlex.quote(url)} "
    return [
        f"Create the first operator: {named}loraplex operators create NAME{where}",
        f"Log in with its key: loraplex login{server}",
        "Create a tenant and a key: loraplex tenants create SLUG && "
        "loraplex keys create --tenant SLUG",
    ]
