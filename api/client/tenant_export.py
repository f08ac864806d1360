"""Exports a tenant's data into a folder: lists as JSON lines, adapters as PEFT files, and files.

Memory is bounded: lists are written as their pages arrive, and files in pieces.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from urllib.parse import quote

from ..local.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from .api_client import ApiClient, api_path
from .downloads import download_adapter, write_file
from .errors import ApiRefused, ClientError
from .progress import Progress

SUMMARY_FILE = "export.json"
"""Written last: a folder with it is a complete export."""
LISTS: Mapping[str, str] = {
    "users": "/users",
    "keys": "/keys",
    "budgets": "/budgets",
    "usage": "/usage",
    "audit": "/audit",
    "requests": "/requests",
}
"""The paths of the lists that are exported as they are."""
_DOWNLOADABLE = "ready"


class TenantExport:
    """One export, which continues an interrupted one: downloads that are whole are kept."""

    def __init__(self, client: ApiClient, folder: Path, progress: Progress) -> None:
        self._client = client
        self._folder = folder
        self._progress = progress
        self._counts: dict[str, int] = {}

    def run(self) -> Mapping[str, int]:
        """Export everything; the number of entries by kind. Raises ClientError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / SUMMARY_FILE).unlink(missing_ok=True)
            for name, path in LISTS.items():
                self._write(name, _entries(self._client, path))
            self._write("adapters", self._adapters())
            self._write("files", self._files())
            self._write("batches", openai_entries(self._client, "/batches"))
            self._write("jobs", openai_entries(self._client, "/fine_tuning/jobs"))
            self._write("golden_sets", self._golden_sets())
            self._write("evaluations", self._evaluations())
            self._write("responses", self._responses())
            summary = {"tenant": self._client.get("/me")["tenant"], "counts": self._counts}
            (self._folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as exc:
            raise ClientError(f"{exc.filename or self._folder}: {exc.strerror}") from exc
        return self._counts

    def _write(self, name: str, entries: Iterable[Any]) -> None:
        """Write a list as JSON lines."""
        self._counts[name] = 0
        with (self._folder / f"{name}.jsonl").open("w", encoding="utf-8") as output:
            for entry in entries:
                output.write(json.dumps(entry, ensure_ascii=False) + "\n")
                self._counts[name] += 1

    def _adapters(self) -> Iterator[Any]:
        """Every version of every adapter; the files of those that are ready are downloaded."""
        for adapter in _entries(self._client, "/adapters"):
            name = adapter["name"]
            for version in _entries(self._client, api_path("adapters", name, "versions")):
                if version["state"] == _DOWNLOADABLE:
                    self._download_version(name, version["version"])
                yield {"adapter": adapter, "version": version}

    def _download_version(self, name: str, number: int) -> None:
        folder = self._folder / "adapters" / _file_name(name) / str(number)
        if all((folder / file).exists() for file in (CONFIG_FILE, WEIGHTS_FILE)):
            return
        path = api_path("adapters", name, "versions", number, "files")
        download_adapter(self._client, path, folder, force=True, progress=self._progress)

    def _files(self) -> Iterator[Any]:
        """Every file, which is downloaded too."""
        folder = self._folder / "files"
        folder.mkdir(exist_ok=True)
        for file in openai_entries(self._client, "/files"):
            target = folder / _file_name(file["id"])
            if not target.exists():
                with self._client.download(api_path("files", file["id"], "content")) as response:
                    write_file(response, target, self._progress)
            yield file

    def _golden_sets(self) -> Iterator[Any]:
        """Those of every adapter; their files are among the files."""
        for adapter in _entries(self._client, "/adapters"):
            yield from _entries(self._client, api_path("adapters", adapter["name"], "golden-sets"))

    def _evaluations(self) -> Iterator[Any]:
        """Those of every adapter, with their reports."""
        for adapter in _entries(self._client, "/adapters"):
            path = api_path("adapters", adapter["name"], "evaluations")
            for evaluation in openai_entries(self._client, path):
                yield self._client.get(f"{path}/{evaluation['id']}")

    def _responses(self) -> Iterator[Any]:
        """Every stored response with the items of its input; those that expire meanwhile are left
        out."""
        for stored in _entries(self._client, "/stored-responses"):
            path = api_path("responses", stored["id"])
            try:
                response = self._client.get(path)
                items = list(openai_entries(self._client, f"{path}/input_items", order="asc"))
            except ApiRefused as exc:
                if exc.code != "response_not_found":
                    raise
                continue
            yield {**stored, "response": response, "input": items}


@contextmanager
def packed(target: Path | None) -> Iterator[Path]:
    """A folder for an export, of which a tar is written to the file `target` at the end, or to
    stdout if it is None. The folder is beside the file, or among the temporary files.

    The file appears when it is complete. Raises ClientError.
    """
    parent = None if target is None else target.absolute().parent
    try:
        with TemporaryDirectory(prefix=".loraplex-export-", dir=parent) as temporary:
            folder = Path(temporary) / "export"
            yield folder
            if target is None:
                _write_tar(folder, sys.stdout.buffer)
                return
            unfinished = Path(temporary) / "export.tar"
            with unfinished.open("wb") as output:
                _write_tar(folder, output)
            unfinished.replace(target)
    except OSError as exc:
        raise ClientError(f"{exc.filename or target or 'stdout'}: {exc.strerror}") from exc


def _write_tar(folder: Path, output: IO[bytes]) -> None:
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)


def _entries(client: ApiClient, path: str) -> Iterable[Any]:
    """A list, whether it has pages or not."""
    first = client.get(path)
    if "next_after" not in first:
        entries: list[Any] = first["data"]
        return entries
    return _all_pages(first, lambda after: client.get(path, after=after), "next_after")


def openai_entries(client: ApiClient, path: str, **query: str) -> Iterable[Any]:
    """A list with the pages of OpenAI's API."""
    first = client.get(path, **query)
    return _all_pages(first, lambda after: client.get(path, after=after, **query), "last_id")


def _all_pages(page: Any, read: Callable[[str], Any], cursor: str) -> Iterator[Any]:
    while True:
        yield from page["data"]
        if not page["has_more"]:
            return
        page = read(page[cursor])


def _file_name(name: str) -> str:
    """A name from the server as one part of a path: it cannot leave the folder."""
    return quote(name, safe="").replace(".", "%2E")
