"""Pushes one adapter folder: checks, hashes, uploads in parts, and resumes interrupted uploads."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..local.adapter_folder import AdapterFolder, FolderUnusable, read_adapter_folder
from .client import ApiClient, ApiRefused, ServerUnreachable, api_path
from .exit_codes import CommandFailed, ExitCode
from .output import note
from .polling import pauses
from .progress import open_progress

PART_BYTES = 8 << 20
MAX_RECONNECTS = 5
FIRST_PAUSE_SECONDS = 0.5
SETTLED_STATES = frozenset({"ready", "rejected"})


class PushInterrupted(CommandFailed):
    """^C in the middle of a push."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Interrupted. {name} is unchanged, and the uploaded bytes are kept. Run the same "
            "command to resume.",
            ExitCode.INTERRUPTED,
        )


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """An adapter to push."""

    folder: AdapterFolder
    size_bytes: int
    """Of the weights, as `sha256`."""
    sha256: str


def read_adapter(path: Path) -> LocalAdapter:
    """Check the folder and hash its weights. Raises CommandFailed, saying the way out."""
    try:
        folder = read_adapter_folder(path)
    except FolderUnusable as exc:
        raise _invalid(str(exc)) from exc
    with folder.weights.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return LocalAdapter(folder, folder.weights.stat().st_size, sha256)


def push_adapter(
    client: ApiClient,
    adapter: LocalAdapter,
    name: str,
    *,
    aliases: list[str],
    base_id: str | None,
    is_quiet: bool,
) -> dict[str, Any]:
    """Upload the parts of the adapter that the server lacks; returns the version, not yet attested.

    Raises CommandFailed, and at ^C PushInterrupted, which says how to resume.
    """
    declaration = {
        "config": _config_with_tokens(client, adapter),
        "size_bytes": adapter.size_bytes,
        "sha256": adapter.sha256,
        "aliases": aliases,
        "base_id": base_id,
    }
    try:
        upload = client.post(api_path("adapters", name, "uploads"), declaration)
        if not upload["already"]:
            return _send(client, adapter, name, upload, is_quiet=is_quiet)
    except KeyboardInterrupt:
        raise PushInterrupted(name) from None
    known: dict[str, Any] = upload["version"]
    if not is_quiet:
        note(f"Exists as {known['id']}: nothing was uploaded.")
    return known


def _config_with_tokens(client: ApiClient, adapter: LocalAdapter) -> dict[str, Any]:
    """The adapter's configuration with the tokens that the server's base does not have."""
    folder = adapter.folder
    if not folder.tokens:
        return folder.config
    try:
        num_base_tokens: int = client.get("/base")["num_tokens"]
    except ApiRefused as exc:
        if exc.code != "insufficient_scope":
            raise
        note("Added tokens are pushed without their texts: the key lacks the scope adapters:read.")
        return folder.config
    return folder.config_for(num_base_tokens)


def _send(
    client: ApiClient,
    adapter: LocalAdapter,
    name: str,
    upload: dict[str, Any],
    *,
    is_quiet: bool,
) -> dict[str, Any]:
    if upload["received_bytes"] and not is_quiet:
        note(f"Resuming at {upload['received_bytes']} of {upload['size_bytes']} bytes.")
    with open_progress(is_quiet) as progress, adapter.folder.weights.open("rb") as weights:
        task = progress.add_task(name, total=adapter.size_bytes)
        _send_parts(
            client, upload, weights, lambda received: progress.update(task, completed=received)
        )
    return _commit(client, upload)


def _commit(client: ApiClient, upload: dict[str, Any]) -> dict[str, Any]:
    """The version that the upload became; asked for again while that may succeed later."""
    path = api_path("uploads", upload["id"], "commit")
    num_failures = 0
    while True:
        try:
            version: dict[str, Any] = client.post(path, is_slow=True)
            return version
        except (ServerUnreachable, ApiRefused) as exc:
            if isinstance(exc, ApiRefused) and not exc.is_retryable:
                raise
            num_failures += 1
            if num_failures > MAX_RECONNECTS:
                raise CommandFailed(
                    f"{exc} The uploaded bytes are kept: run the same command to resume.",
                    exc.exit_code,
                ) from exc
            time.sleep(_pause(num_failures))


def wait_until_settled(client: ApiClient, version: dict[str, Any]) -> dict[str, Any]:
    """The version once it is ready. Raises CommandFailed if it is rejected, and at ^C."""
    path = api_path("adapters", version["adapter"], "versions", version["version"])
    try:
        for pause in pauses():
            if version["state"] in SETTLED_STATES:
                break
            time.sleep(pause)
            version = client.get(path)
    except KeyboardInterrupt:
        name = f"{version['adapter']}@{version['version']}"
        raise CommandFailed(
            f"Interrupted. {name} was uploaded and is being checked. Show its progress: "
            f"loraplex adapters why {name}",
            ExitCode.INTERRUPTED,
        ) from None
    if version["state"] == "rejected":
        reason = version["reason"]
        raise _invalid(f"{version['id']} was rejected: {reason['message']} ({reason['code']})")
    return version


def _send_parts(
    client: ApiClient,
    upload: dict[str, Any],
    weights: BinaryIO,
    report: Callable[[int], None],
) -> None:
    """Upload the remaining parts; after a failed part, query the offset again.

    A part may also be refused because the last part of an interrupted push is still being received.
    """
    path = api_path("uploads", upload["id"])
    num_failures = 0
    while upload["received_bytes"] < upload["size_bytes"]:
        offset = upload["received_bytes"]
        report(offset)
        weights.seek(offset)
        try:
            upload = client.put_bytes(f"{path}/content", weights.read(PART_BYTES), offset=offset)
            num_failures = 0
        except (ServerUnreachable, ApiRefused) as exc:
            if isinstance(exc, ApiRefused) and exc.code != "upload_conflict":
                raise
            num_failures += 1
            if num_failures > MAX_RECONNECTS:
                raise
            time.sleep(_pause(num_failures))
            upload = _ask_again(client, path, upload)
    report(upload["received_bytes"])


def _pause(num_failures: int) -> float:
    """Seconds before the next try."""
    return math.ldexp(FIRST_PAUSE_SECONDS, num_failures - 1)


def _ask_again(client: ApiClient, path: str, upload: dict[str, Any]) -> dict[str, Any]:
    try:
        latest: dict[str, Any] = client.get(path)
        return latest
    except ServerUnreachable:
        return upload


def _invalid(message: str) -> CommandFailed:
    return CommandFailed(message, ExitCode.INVALID_ADAPTER)
