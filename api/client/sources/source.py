"""Where an adapter comes from: a folder, an archive, the Hugging Face Hub, or S3.

It is read on the caller's machine with the caller's credentials. The server fetches nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ClientError, InvalidArgument
from ..progress import Progress
from . import bucket, hub
from .archive import is_archive, unpack
from .folder import find_adapter


@contextmanager
def open_source(source: str | Path, progress: Progress) -> Iterator[Path]:
    """The folder with the adapter's files, until the block is left.

    What is downloaded or unpacked is in a temporary folder of the caller. Raises ClientError.
    """
    scheme, has_scheme, _ = str(source).partition("://")
    path = Path(source).expanduser()
    if not has_scheme and not is_archive(path):
        with _files_reported():
            yield find_adapter(path)
        return
    with temporary_folder() as directory:
        if has_scheme:
            yield _download(scheme, str(source), directory, progress)
        else:
            unpack(path, directory)
            yield directory


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that only this user can read. In the block, a file that cannot be read or written
    raises ClientError."""
    with _files_reported(), tempfile.TemporaryDirectory(prefix="loraplex-") as name:
        yield Path(name)


@contextmanager
def _files_reported() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ClientError(f"{exc.filename or tempfile.gettempdir()}: {exc.strerror}") from exc


def _download(scheme: str, source: str, directory: Path, progress: Progress) -> Path:
    """The folder with the adapter's files, in the directory."""
    if scheme == hub.SCHEME:
        return hub.download(hub.parse_hub_folder(source), directory, progress)
    if scheme == bucket.SCHEME:
        bucket.download(bucket.parse_bucket_folder(source), directory, progress)
        return directory
    raise InvalidArgument(
        f"{source} is not a source of adapters. Use a folder, an archive, hf://OWNER/NAME or "
        "s3://BUCKET/PREFIX. Download other addresses first."
    )
