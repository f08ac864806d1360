"""Pushes one adapter from the command line: with progress, and with a way to go on after ^C."""

from __future__ import annotations

from typing import Any

from ..client.api_client import ApiClient
from ..client.local_adapter import LocalAdapter
from ..client.progress import Progress
from ..client.uploads import push_adapter, wait_until_settled
from .exit_codes import CommandFailed, ExitCode


def upload(
    client: ApiClient,
    adapter: LocalAdapter,
    name: str,
    *,
    aliases: list[str],
    base_id: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """The version, not yet attested. Raises CommandFailed at ^C; it says how to resume."""
    try:
        return push_adapter(
            client, adapter, name, aliases=aliases, base_id=base_id, progress=progress
        )
    except KeyboardInterrupt:
        raise CommandFailed(
            f"Interrupted. {name} is unchanged, and the uploaded bytes are kept. Run the same "
            "command to resume.",
            ExitCode.INTERRUPTED,
        ) from None


def wait(client: ApiClient, version: dict[str, Any]) -> dict[str, Any]:
    """The version once it is ready. Raises InvalidAdapter, and CommandFailed at ^C."""
    try:
        return wait_until_settled(client, version)
    except KeyboardInterrupt:
        name = f"{version['adapter']}@{version['version']}"
        raise CommandFailed(
            f"Interrupted. {name} was uploaded and is being checked. Show its progress: "
            f"loraplex adapters why {name}",
            ExitCode.INTERRUPTED,
        ) from None
