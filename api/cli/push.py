"""Pushes one adapter folder: checks, hashes, uploads in parts, and resumes interrupted uploads."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...adapters.added_tokens import FIELD as ADDED_TOKENS
from .client import ApiClient, ApiRefused, ServerUnreachable, api_path
from .exit_codes import CommandFailed, ExitCode
from .output import note
from .polling import pauses
from .progress import open_progress
from .trained_labels import with_labels
from .trained_tokenizer import TokenFields, read_added_tokens

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_CONFIG_FILE = "config.json"
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
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
    """A folder that PEFT's save_pretrained wrote."""

    config: dict[str, Any]
    weights: Path
    size_bytes: int
    sha256: str
    tokens: list[TokenFields]
    """Those that the tokenizer beside it lists as added, the base's too."""

    def config_for(self, num_base_tokens: int) -> dict[str, Any]:
        """The configuration with the tokens that a base does not have."""
        own = [token for token in self.tokens if _is_beyond(token["id"], num_base_tokens)]
        return {ADDED_TOKENS: own, **self.config} if own else self.config


def _is_beyond(token_id: object, num_tokens: int) -> bool:
    return isinstance(token_id, int) and token_id >= num_tokens


def read_adapter(folder: Path) -> LocalAdapter:
    """Check the folder and hash its weights. Raises CommandFailed, saying the way out."""
    weights = folder / WEIGHTS_FILE
    if not folder.is_dir():
        raise _invalid(f"{folder} is not a folder. Give the one that save_pretrained wrote.")
    if not weights.is_file():
        raise _invalid(_explain_missing_weights(folder))
    with weights.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    config = with_labels(_read_config(folder), folder / MODEL_CONFIG_FILE)
    return LocalAdapter(config, weights, weights.stat().st_size, sha256, read_added_tokens(folder))


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
    if not adapter.tokens:
        return adapter.config
    try:
        num_base_tokens: int = client.get("/base")["num_tokens"]
    except ApiRefused as exc:
        if exc.code != "insufficient_scope":
            raise
        note("Added tokens are pushed without their texts: the key lacks the scope adapters:read.")
        return adapter.config
    return adapter.config_for(num_base_tokens)


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
    with open_progress(is_quiet) as progress, adapter.weights.open("rb") as weights:
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


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(config, ensure_ascii=False, allow_nan=False).encode()  # as it will be sent
    except FileNotFoundError:
        raise _invalid(f"{folder} has no {CONFIG_FILE}: push what save_pretrained wrote.") from None
    except (ValueError, RecursionError) as exc:
        raise _invalid(f"{path} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise _invalid(f"{path} is not a JSON object.")
    return config


def _explain_missing_weights(folder: Path) -> str:
    for name in PICKLED_FILES:
        if (folder / name).exists():
            return (
                f"{folder / name} is a pickle, which could execute code. Save it again with "
                "model.save_pretrained(path, safe_serialization=True)."
            )
    if (folder / MODEL_CONFIG_FILE).exists() and not (folder / CONFIG_FILE).exists():
        return (
            f"{folder} holds a whole model and no adapter. Save the PEFT model itself, before "
            "merge_and_unload(): peft_model.save_pretrained(path)."
        )
    return f"{folder} has no {WEIGHTS_FILE}: push what PEFT's save_pretrained wrote."


def _invalid(message: str) -> CommandFailed:
    return CommandFailed(message, ExitCode.INVALID_ADAPTER)
