"""An adapter in a tar or zip archive.

Only the files of an adapter are read, and only regular ones: links, devices and paths that lead out
of the archive are never written. Bytes are counted while they are unpacked, because the sizes that
an archive states may be wrong.
"""

from __future__ import annotations

import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from ...local.adapter_folder import ADAPTER_FILES, WEIGHTS_FILE
from ..errors import InvalidAdapter
from .listing import Listing

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
MAX_MEMBERS = 100_000
MAX_WEIGHTS_BYTES = 64 << 30
MAX_JSON_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError)
_UNREADABLE = (RuntimeError, NotImplementedError)
"""Of zip: with a password, or in a compression that Python does not have."""


class _Member(NamedTuple):
    name: str
    is_link: bool
    is_regular: bool
    open: Callable[[], IO[bytes]]


def is_archive(path: Path) -> bool:
    """Whether the path is a file with the name of an archive."""
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def unpack(archive: Path, directory: Path) -> None:
    """Write the files of the archive's adapter to the directory.

    Raises InvalidAdapter if the archive is damaged or too large, or holds no adapter or several.
    """
    opened = _open_zip if archive.name.lower().endswith(".zip") else _open_tar
    try:
        with opened(archive) as members:
            files = _regular_files(archive, members)
            listing = Listing(files.keys(), lambda folder: f"{archive}/{folder}".rstrip("/"))
            for path in listing.files_of(listing.choose("")):
                _write(archive, path, files[path], directory)
    except (*_DAMAGED, *_UNREADABLE) as exc:
        raise InvalidAdapter(f"{archive} cannot be unpacked: {exc}") from exc


@contextmanager
def _open_zip(archive: Path) -> Iterator[Iterable[_Member]]:
    with zipfile.ZipFile(archive) as file:
        yield (
            _Member(
                info.filename,
                is_link=stat.S_ISLNK(info.external_attr >> 16),
                is_regular=not info.is_dir(),
                open=partial(file.open, info),
            )
            for info in file.infolist()
        )


@contextmanager
def _open_tar(archive: Path) -> Iterator[Iterable[_Member]]:
    with tarfile.open(archive) as file:
        yield (
            _Member(
                info.name,
                is_link=info.issym() or info.islnk(),
                is_regular=info.isreg(),
                open=partial(_content, file, info),
            )
            for info in file
        )


def _content(file: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    content = file.extractfile(info)
    assert content is not None, "a regular file has content"
    return content


def _regular_files(
    archive: Path, members: Iterable[_Member]
) -> Mapping[str, Callable[[], IO[bytes]]]:
    """The regular files by their paths. Raises InvalidAdapter if a file of an adapter is a link."""
    found: dict[str, Callable[[], IO[bytes]]] = {}
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise InvalidAdapter(f"{archive} has more than {MAX_MEMBERS} members.")
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts:
            continue
        if member.is_link and path.name in ADAPTER_FILES:
            raise InvalidAdapter(
                f"{archive}: {path} is a link. Pack the file itself, such as with `tar -h`."
            )
        if member.is_regular and not member.is_link:
            found[str(path)] = member.open
    return found


def _write(archive: Path, path: str, opened: Callable[[], IO[bytes]], directory: Path) -> None:
    name = PurePosixPath(path).name
    room = MAX_WEIGHTS_BYTES if name == WEIGHTS_FILE else MAX_JSON_BYTES
    with opened() as content, (directory / name).open("wb") as output:
        while piece := content.read(_PIECE_BYTES):
            room -= len(piece)
            if room < 0:
                raise InvalidAdapter(f"{archive}: {path} is too large for an adapter.")
            output.write(piece)
