"""`loraplex fleet up|scale|down`: replicas that Ray places and restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ...engine.shards.rank_place import GroupShape
from .agent_options import CHOSEN_BY_NODES, agent_options
from .connection import asks_no_server
from .exit_codes import CommandFailed, ExitCode

Ray = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address of the Ray cluster, or `auto`.")
]
READY_SECONDS = 600.0
POLL_SECONDS = 0.5


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    # What they do not know are options of the agents.
    agents = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("up", context_settings=agents)(asks_no_server(up))
    app.command("scale")(asks_no_server(scale))
    app.command("down")(asks_no_server(down))


def up(
    context: typer.Context,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")],
    certificates: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the agents' certificates on each node.")
    ],
    minimum: Annotated[
        int | None,
        typer.Option("--min", min=1, help="Fewest replicas.", show_default="no autoscaling"),
    ] = None,
    maximum: Annotated[
        int | None,
        typer.Option("--max", min=1, help="Most replicas.", show_default="no autoscaling"),
    ] = None,
    ray: Ray = "auto",
    num_gpus: Annotated[
        float, typer.Option(min=0, help="GPUs that Ray reserves for each stage of a replica.")
    ] = 0,
    num_cpus: Annotated[
        float, typer.Option(min=0, help="CPUs that Ray reserves for each stage of a replica.")
    ] = 1,
    max_drain_seconds: Annotated[
        float, typer.Option(min=0, help="Maximum time that a leaving replica may take to finish.")
    ] = 300,
    join: Annotated[
        bool,
        typer.Option(
            "--join",
            help="Use a fleet that is up already as it is, and return when one replica is ready.",
        ),
    ] = False,
) -> None:
    """Start replicas on a Ray cluster, and a controller that replaces lost ones.

    With --min and --max the controller chooses the number by the load of the replicas.
    Further options are those of `loraplex agent`, such as --model and --config; variables and the
    file are read here, and not on the nodes. API servers with the same
    database serve with the replicas.
    """
    if not num_cpus + num_gpus:
        raise CommandFailed("--num-cpus and --num-gpus cannot both be 0.", ExitCode.USAGE)
    limits = _limits(minimum, replicas, maximum)
    context_of_agent = agent_context(context.args, certificates)
    with _connected(ray):
        from ..ray.controller import FleetSpec, start_controller
        from ..ray.replica_actor import ReplicaSpec

        spec = ReplicaSpec(
            str(certificates.absolute()),
            agent_options(context_of_agent),
            num_cpus,
            num_gpus,
            group_shape(context_of_agent),
        )
        try:
            controller = start_controller(FleetSpec(spec, max_drain_seconds, limits))
        except ValueError:
            if not join:
                raise CommandFailed(
                    "The fleet is up already. Change its size with `loraplex fleet scale`, or end "
                    "it with `loraplex fleet down`.",
                    ExitCode.CONFLICT,
                ) from None
            typer.echo("The fleet is up already.", err=True)
            controller = _controller()
        else:
            _set_number(controller, replicas)
        _wait(controller, 1 if join else replicas, may_be_more=join)


def scale(
    number: Annotated[int, typer.Argument(min=1, metavar="N", help="Number of replicas.")],
    ray: Ray = "auto",
) -> None:
    """Change the number of replicas. Those that leave finish their requests first."""
    with _connected(ray):
        controller = _controller()
        _set_number(controller, number)
        _wait(controller, number)


def down(ray: Ray = "auto") -> None:
    """End all replicas after their requests, and the controller."""
    with _connected(ray) as client:
        controller = _controller()
        _set_number(controller, 0)
        _wait(controller, 0)
        client.kill(controller)
    typer.echo("The fleet is down.")


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray's module, connected to the cluster. Failures become CommandFailed."""
    check_installed()
    import ray

    from ..ray.cluster import ClusterRefused, connect

    try:
        connect(address)
        yield ray
    except ClusterRefused as exc:
        raise CommandFailed(str(exc), ExitCode.UNAVAILABLE) from exc
    except ray.exceptions.RayError as exc:
        raise CommandFailed(str(exc).strip(), ExitCode.UNAVAILABLE) from exc
    finally:
        ray.shutdown()


def check_installed() -> None:
    """Raises CommandFailed."""
    if find_spec("ray") is None:
        raise CommandFailed("Ray is not installed: pip install 'loraplex[ray]'")


def _limits(minimum: int | None, replicas: int, maximum: int | None) -> tuple[int, int] | None:
    """None without autoscaling. Raises CommandFailed."""
    if minimum is None and maximum is None:
        return None
    if minimum is None or maximum is None or not minimum <= replicas <= maximum:
        raise CommandFailed(
            "Autoscaling needs --min and --max with --replicas between them.", ExitCode.USAGE
        )
    return minimum, maximum


def agent_context(options: Sequence[str], certificates: Path) -> typer.Context:
    """What the agents have to know, from the options, variables and a file.

    Raises a usage error for what `loraplex agent` would refuse on every node."""
    from . import load_command

    for option in CHOSEN_BY_NODES:
        if any(each.split("=")[0] == option for each in options):
            raise CommandFailed(f"{option} is chosen by the node.", ExitCode.USAGE)
    given = [*options, "--certificates", str(certificates)]
    context: typer.Context = load_command("agent").make_context("agent", given)
    return context


def group_shape(context: typer.Context) -> GroupShape:
    """The ranks of a replica. `context`: with the options of an agent."""
    found = context.params
    return GroupShape(found["tensor_parallel_size"], found["pipeline_parallel_size"])


def _controller() -> Any:
    from ..ray.controller import find_controller

    controller = find_controller()
    if controller is None:
        raise CommandFailed("The fleet is not up. Start it with `loraplex fleet up`.")
    return controller


def _set_number(controller: Any, number: int) -> None:
    import ray

    ray.get(controller.scale.remote(number))


def _wait(controller: Any, number: int, *, may_be_more: bool = False) -> None:
    """Until this number of replicas has an address, and there is no other unless `may_be_more`.

    Raises CommandFailed if they do not start.
    """
    import ray

    ends_at, told = time.monotonic() + READY_SECONDS, set[str]()
    while time.monotonic() < ends_at:
        found = ray.get(controller.status.remote())
        for each in found:
            if each.failure is not None and each.failure not in told:
                typer.echo(f"replica {each.id}: {each.failure}", err=True)
                told.add(each.failure)
        ready = [each for each in found if each.address]
        if len(ready) == number == len(found) or (may_be_more and len(ready) >= number):
            for each in ready:
                typer.echo(f"{each.id}  {each.address}")
            return
        time.sleep(POLL_SECONDS)
    raise CommandFailed(
        f"There are not {number} replicas after {READY_SECONDS:g} s. The controller keeps trying.",
        ExitCode.UNAVAILABLE,
    )
