"""Uploads one adapter in parts, resumes interrupted uploads, and waits until a version is ready."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from .api_client import ApiClient, api_path
from .errors import ApiRefused, InvalidAdapter, ServerUnreachable
from .local_adapter import LocalAdapter
from .polling import pauses
from .progress import Progress

PART_BYTES = 8 << 20
MAX_RECONNECTS = 5
FIRST_PAUSE_SECONDS = 0.5
SENT_AGAIN = frozenset({"upload_conflict", "store_unavailable"})
"""Refusals of a part after which it is sent again."""
SETTLED_STATES = frozenset({"ready", "rejected"})


def push_adapter(
    client: ApiClient,
    adapter: LocalAdapter,
    name: str,
    *,
    aliases: list[str],
    base_id: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """Upload the parts of the adapter that the server lacks; returns the version, not yet attested.

    Raises ClientError. After it, and after an interruption, another call resumes.
    """
    declaration = {
        "config": _config_with_tokens(client, adapter, progress),
        "size_bytes": adapter.size_bytes,
        "sha256": adapter.sha256,
        "aliases": aliases,
        "base_id": base_id,
    }
    upload = client.post(api_path("adapters", name, "uploads"), declaration)
    if not upload["already"]:
        return _send(client, adapter, name, upload, progress)
    known: dict[str, Any] = upload["version"]
    progress.note(f"Exists as {known['id']}: nothing was uploaded.")
    return known


def _config_with_tokens(
    client: ApiClient, adapter: LocalAdapter, progress: Progress
) -> dict[str, Any]:
    """The adapter's configuration with the tokens that the server's base does not have."""
    folder = adapter.folder
    if not folder.tokens:
        return folder.config
    try:
        num_base_tokens: int = client.get("/base")["num_tokens"]
    except ApiRefused as exc:
        if exc.code != "insufficient_scope":
            raise
        progress.warn(
            "Added tokens are pushed without their texts: the key lacks the scope adapters:read."
        )
        return folder.config
    return folder.config_for(num_base_tokens)


def _send(
    client: ApiClient,
    adapter: LocalAdapter,
    name: str,
    upload: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    if upload["received_bytes"]:
        progress.note(f"Resuming at {upload['received_bytes']} of {upload['size_bytes']} bytes.")
    with (
        progress.transfer(name, adapter.size_bytes) as report,
        adapter.folder.weights.open("rb") as weights,
    ):
        _send_parts(client, upload, weights, report)
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
                raise exc.with_hint("The uploaded bytes are kept: push again to resume.") from None
            time.sleep(_pause(num_failures))


def wait_until_settled(client: ApiClient, version: dict[str, Any]) -> dict[str, Any]:
    """The version once it is ready. Raises InvalidAdapter if it is rejected."""
    path = api_path("adapters", version["adapter"], "versions", version["version"])
    for pause in pauses():
        if version["state"] in SETTLED_STATES:
            break
        time.sleep(pause)
        version = client.get(path)
    if version["state"] == "rejected":
        reason = version["reason"]
        raise InvalidAdapter(
            f"{version['id']} was rejected: {reason['message']} ({reason['code']})",
            code=reason["code"],
        )
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
            if isinstance(exc, ApiRefused) and exc.code not in SENT_AGAIN:
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
