"""`loraplex fleet`: the replicas of a fleet, and the certificates of its machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import fleet_ray
from .client import ApiClient, api_path, open_client
from .connection import asks_no_server
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)
fleet_ray.add_to(app)

COLUMNS = [
    *(
        "address",
        "role",
        "state",
        "wish",
        "device",
        "running",
        "waiting",
        "resident",
        "loading",
    ),
    *("kv", "handovers", "restarts", "seen_at", "id"),
]

Address = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT", help="Where its agent listens; an IPv6 address is in brackets."
    ),
]
Name = Annotated[str, typer.Argument(metavar="REPLICA", help="The replica's address or ID.")]


@app.command("status")
def status(as_json: AsJson = False) -> None:
    """Show the replicas, and how the answering server sees them."""
    with open_client() as client:
        replicas = _list(client)
    _print(replicas, replicas, as_json=as_json)


@app.command("add")
def add(address: Address, as_json: AsJson = False) -> None:
    """Add the replica whose agent listens at an address. API servers connect within seconds."""
    with open_client() as client:
        replica = client.admin.post("/replicas", {"address": address})
    _print([replica], replica, as_json=as_json)


@app.command("drain")
def drain(name: Name, as_json: AsJson = False) -> None:
    """Send a replica no further requests. Its open ones finish."""
    _change(name, "drain", as_json=as_json)


@app.command("resume")
def resume(name: Name, as_json: AsJson = False) -> None:
    """Send a drained replica requests again."""
    _change(name, "resume", as_json=as_json)


@app.command("remove")
def remove(name: Name, as_json: AsJson = False) -> None:
    """Remove a replica for good. Drain it first: requests that it still runs end with an error."""
    with open_client() as client:
        replica = client.admin.delete(api_path("replicas", _find(client, name)))
    _print([replica], replica, as_json=as_json)
    note(f"Removed. Stop the agent at {replica['address']} now.")


@app.command("certificates")
@asks_no_server
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the files.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until they expire.")] = 365,
) -> None:
    """Make an authority, and certificates of agents and API servers. Existing files are kept."""
    from ..fleet.certificate_authority import write_certificates

    try:
        ends_at = write_certificates(folder, days=days)
    except FileExistsError as exc:
        raise CommandFailed(f"{exc}. Choose another folder.", ExitCode.CONFLICT) from exc
    except OSError as exc:
        raise CommandFailed(str(exc)) from exc
    note(f"Valid until {ends_at.isoformat()}.")
    note(f"Each agent needs authority.pem, agent.pem and agent.key of {folder}.")
    note("Each API server needs authority.pem, api.pem and api.key.")
    note("Copy authority.key to none of them: it signs certificates for new members of the fleet.")


def _change(name: str, deed: str, *, as_json: bool) -> None:
    with open_client() as client:
        replica = client.admin.post(api_path("replicas", _find(client, name), deed))
    _print([replica], replica, as_json=as_json)


def _list(client: ApiClient) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = client.admin.get("/replicas")["data"]
    return replicas


def _find(client: ApiClient, name: str) -> str:
    """The ID of the replica with this ID or address. Raises CommandFailed."""
    for replica in _list(client):
        if name in (replica["id"], replica["address"]):
            return str(replica["id"])
    raise CommandFailed(f"Replica not found: {name}.", ExitCode.NOT_FOUND)


def _print(replicas: list[dict[str, Any]], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows([row_of(replica) for replica in replicas], COLUMNS)


def row_of(replica: dict[str, Any]) -> dict[str, Any]:
    """The columns of a replica. Figures are None unless the answering server is connected to it."""
    connection = replica["connection"]
    seen = connection if connection and not connection["failure"] else {}
    return {
        **{name: replica[name] for name in ("address", "seen_at", "id")},
        **figures_of(seen),
        "state": state_of(replica),
        "wish": "draining" if replica["is_draining"] else "serving",
    }


def figures_of(seen: dict[str, Any]) -> dict[str, Any]:
    """The figures of a connection; None where it is `{}`."""
    handovers = seen.get("handovers")
    return {
        "role": seen.get("role"),
        "device": seen.get("device") or None,
        "running": f"{seen['num_running']}/{seen['max_batch']}" if "max_batch" in seen else None,
        "waiting": seen.get("num_waiting"),
        "resident": seen.get("num_resident"),
        "loading": seen.get("num_loading"),
        "kv": None if "kv_usage" not in seen else f"{seen['kv_usage']:.0%}",
        "handovers": None if not handovers else _pace(handovers),
        "restarts": seen.get("num_restarts"),
    }


def _pace(handovers: dict[str, Any]) -> str:
    """`1.50/s, 201 MB/s`: the prefixes that the replica sends or gets."""
    megabytes = handovers["bytes_per_second"] / 1e6
    return f"{handovers['complete_per_second']:.2f}/s, {megabytes:.0f} MB/s"


def state_of(replica: dict[str, Any]) -> str | None:
    """The state that the answering server sees, or why it cannot reach the replica; without a
    connection of that server, what the agent last reported."""
    seen = replica["connection"]
    if seen is None:
        return replica["state"] if replica["is_live"] else "unseen"
    return str(seen["failure"]["code"] if seen["failure"] else seen["state"])
