"""Downloads an adapter's files and verifies their digests."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import httpx

from ..local.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from .api_client import ApiClient, api_path
from .errors import ClientError, FileExists, ServerUnreachable
from .progress import Progress


def download_adapter(
    client: ApiClient, path: str, directory: Path, *, force: bool, progress: Progress
) -> list[Path]:
    """Write the files below the API's `path` to `directory`; their paths here.

    A file has its name only when it is whole. Raises ClientError, also if one is there and
    may not be replaced.
    """
    files = [directory / CONFIG_FILE, directory / WEIGHTS_FILE]
    for file in files:
        if file.exists() and not force:
            raise FileExists(f"{file} exists. Use another folder, or force to overwrite it.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            with client.download(path + api_path(file.name)) as response:
                write_file(response, file, progress)
    except OSError as exc:
        raise ClientError(f"{exc.filename or directory}: {exc.strerror}") from exc
    return files


def write_file(response: httpx.Response, file: Path, progress: Progress) -> None:
    """Write a download to `file`, which has its name only when it is whole. Raises ClientError."""
    unfinished = file.with_name(f"{file.name}.part")
    size_bytes = int(response.headers["content-length"])
    hasher = hashlib.sha256()
    try:
        with progress.transfer(file.name, size_bytes) as report, unfinished.open("wb") as output:
            for piece in response.iter_bytes():
                output.write(piece)
                hasher.update(piece)
                report(output.tell())
        if response.headers["repr-digest"] != _repr_digest(hasher.digest()):
            raise ServerUnreachable(f"{file.name} was damaged in transit.")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _repr_digest(sha256: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"
