"""`loraplex adapters pin`, `prefetch` and `why`: controls and explains where weights are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..client.polling import pauses
from ..client.references import Reference, version_path
from .client import ApiClient, api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite
from .output import AsJson, note, print_json
from .references import Version

Ttl = Annotated[
    float | None,
    typer.Option(
        "--ttl",
        min=1,
        callback=check_finite,
        help="Seconds until it expires.",
        show_default="never",
    ),
]
Wait = Annotated[bool, typer.Option(help="Wait until the weights are on the device.")]

_EXIT_CODES = {
    "rejected": ExitCode.INVALID_ADAPTER,
    "base_mismatch": ExitCode.INVALID_ADAPTER,
}


def pin(version: Version, ttl: Ttl = None, wait: Wait = False, as_json: AsJson = False) -> None:
    """Keep a version on the device until it is unpinned, also across restarts."""
    with open_client() as client:
        path = version_path(client, version)
        standing = client.put(f"{path}/pin", {"ttl_seconds": ttl})
        _print_standing(_settled(client, path, standing) if wait else standing, as_json=as_json)


def unpin(version: Version, as_json: AsJson = False) -> None:
    """Allow a version to be evicted from the device again."""
    with open_client() as client:
        standing = client.delete(version_path(client, version, "pin"))
    _print_standing(standing, as_json=as_json)


def prefetch(
    version: Version, ttl: Ttl = None, wait: Wait = False, as_json: AsJson = False
) -> None:
    """Load a version to the device before its first request."""
    with open_client() as client:
        path = version_path(client, version)
        standing = client.post(f"{path}/prefetch", {"ttl_seconds": ttl})
        _print_standing(_settled(client, path, standing) if wait else standing, as_json=as_json)


def why(version: Version, as_json: AsJson = False) -> None:
    """Explain why a version is not ready.

    Exit status: 0 if requests are accepted, 6 if they never can be, otherwise 7.
    """
    with open_client() as client:
        standing = client.get(version_path(client, version, "readiness"))
        history = client.get(_history_path(version, standing))["data"] if not as_json else []
    _print_standing(standing, as_json=as_json)
    if not as_json:
        for line in details(standing, history):
            note(line)
    if not standing["is_servable"]:
        raise typer.Exit(_EXIT_CODES.get(standing["reason"], ExitCode.UNAVAILABLE))


def details(standing: dict[str, Any], history: list[dict[str, Any]]) -> Iterator[str]:
    """The lines after the summary: the adapter's history, and the acceptance of its draft
    tokens."""
    for entry in history:
        reason = f"  {entry['reason']['code']}" if entry["reason"] else ""
        yield f"{entry['at']}  {entry['state']}{reason}"
    for entry in (standing["load"] or {}).get("transitions", ()):
        reason = f"  {entry['reason']}" if entry["reason"] else ""
        yield f"{entry['seconds_ago']:.1f} s ago  {entry['state']}{reason}"
    yield from map(_acceptance, standing["speculation"])


def _acceptance(entry: dict[str, Any]) -> str:
    accepted = f"{entry['accepted_tokens']} of {entry['draft_tokens']} draft tokens accepted"
    now = f"{entry['num_tokens']} draft tokens per step" if entry["num_tokens"] else "off"
    return f"{entry['proposer']}  {accepted}, lately {entry['acceptance']:.0%}: {now}"


def _history_path(version: Reference, standing: dict[str, Any]) -> str:
    return api_path("adapters", version.name, "versions", standing["version"], "history")


def _settled(client: ApiClient, path: str, standing: dict[str, Any]) -> dict[str, Any]:
    """The readiness once the version is resident. Raises CommandFailed if it will not become
    resident."""
    try:
        return _wait(client, path, standing)
    except KeyboardInterrupt:
        raise CommandFailed(
            "Interrupted. The request stays in effect.", ExitCode.INTERRUPTED
        ) from None


def _wait(client: ApiClient, path: str, standing: dict[str, Any]) -> dict[str, Any]:
    for pause in pauses():
        if standing["is_ready"]:
            break
        if not standing["is_servable"] or standing["reason"] == "load_failed":
            raise CommandFailed(
                f"{standing['summary']} The request stays in effect.",
                _EXIT_CODES.get(standing["reason"], ExitCode.UNAVAILABLE),
            )
        time.sleep(pause)
        standing = client.get(f"{path}/readiness")
    return standing


def _print_standing(standing: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(standing)
        return
    typer.echo(standing["summary"])
    for wish in standing["wishes"]:
        until = f"until {wish['expires_at']}" if wish["expires_at"] else "without expiry"
        note(f"{wish['kind']}, {until}")
