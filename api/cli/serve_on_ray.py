"""The replicas of `loraplex serve --ray`. `loraplex fleet up` starts them, in a process of its own:
API servers do not import Ray."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from ...platform.replicas import service as replicas
from ..settings import Settings
from .admin import open_current_database
from .agent_options import agent_options
from .exit_codes import CommandFailed, ExitCode
from .fleet_ray import check_installed

FLEET_UP = (sys.executable, "-P", "-m", "loraplex", "fleet", "up", "--join")


@dataclass(frozen=True, slots=True)
class RayReplicas:
    """What `loraplex fleet up` is asked for."""

    number: int
    ray: str
    """Address of the cluster, or `auto`."""
    num_gpus: float
    agent_options: tuple[str, ...]

    def command(self, certificates: Path) -> list[str]:
        return [
            *(*FLEET_UP, "--replicas", str(self.number), "--ray", self.ray),
            *("--num-gpus", str(self.num_gpus), "--certificates", str(certificates)),
            *self.agent_options,
        ]


def find_replicas(
    context: typer.Context, number: int | None, ray: str | None, num_gpus: float
) -> RayReplicas | None:
    """What the options of `loraplex serve` ask for; None: no replicas on Ray.

    Raises CommandFailed.
    """
    if number is None and ray is None:
        return None
    if number is None or ray is None:
        raise CommandFailed("--replicas and --ray need each other.", ExitCode.USAGE)
    return RayReplicas(number, ray, num_gpus, agent_options(context))


def bring_up(wanted: RayReplicas, settings: Settings) -> None:
    """Start the fleet, or join the one that is up, and return when a replica is ready.

    Raises CommandFailed, Exit after a message of `loraplex fleet up`, or a PlatformError.
    """
    from ..server.planes import open_control_plane

    check_installed()
    if settings.fleet_certificates is None:
        raise CommandFailed(
            "--ray needs --fleet-certificates. Make them with `loraplex fleet certificates DIR`.",
            ExitCode.USAGE,
        )
    settings.prepare_data_dir()
    open_control_plane(settings).close()  # the controller starts only with a database
    ended = subprocess.run(wanted.command(settings.fleet_certificates), check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)
    _check_database(settings)


def _check_database(settings: Settings) -> None:
    """Raises CommandFailed if the fleet's controller writes to another one."""
    with (
        open_current_database(settings) as database,
        database.platform_transaction(read_only=True) as session,
    ):
        has_replicas = bool(replicas.list_replicas(session))
    if not has_replicas:
        raise CommandFailed(
            "The fleet's replicas are not in this server's database. Start Ray's head and the "
            "server with the same LORAPLEX_DATABASE."
        )
