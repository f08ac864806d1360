"""Downloads an adapter's files and verifies their digests."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import httpx

from .client import ApiClient, ServerUnreachable, api_path
from .exit_codes import CommandFailed, ExitCode
from .progress import open_progress
from .push import CONFIG_FILE, WEIGHTS_FILE


def download_adapter(
    client: ApiClient, path: str, directory: Path, *, force: bool, is_quiet: bool
) -> list[Path]:
    """Write the files below the API's `path` to `directory`; their paths here.

    A file has its name only when it is whole. Raises CommandFailed, also if one is there and may
    not be replaced.
    """
    files = [directory / CONFIG_FILE, directory / WEIGHTS_FILE]
    for file in files:
        if file.exists() and not force:
            raise CommandFailed(
                f"{file} exists. Use another folder, or --force to overwrite it.",
                ExitCode.CONFLICT,
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            with client.download(path + api_path(file.name)) as response:
                write_file(response, file, is_quiet=is_quiet)
    except OSError as exc:
        raise CommandFailed(f"{exc.filename or directory}: {exc.strerror}") from exc
    return files


def write_file(response: httpx.Response, file: Path, *, is_quiet: bool) -> None:
    """Write a download to `file`, which has its name only when it is whole. Raises
    CommandFailed."""
    unfinished = file.with_name(f"{file.name}.part")
    size_bytes = int(response.headers["content-length"])
    hasher = hashlib.sha256()
    try:
        with open_progress(is_quiet) as progress, unfinished.open("wb") as output:
            task = progress.add_task(file.name, total=size_bytes)
            for piece in response.iter_bytes():
                output.write(piece)
                hasher.update(piece)
                progress.advance(task, len(piece))
        if response.headers["repr-digest"] != _repr_digest(hasher.digest()):
            raise ServerUnreachable(f"{file.name} was damaged in transit.", ExitCode.UNAVAILABLE)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _repr_digest(sha256: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"
