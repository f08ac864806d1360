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
        yield find_adapter(path)
        return
    with temporary_folder() as directory:
        if not has_scheme:
            unpack(path, directory)
            yield directory
        elif scheme == hub.SCHEME:
            yield hub.download(hub.parse_hub_folder(str(source)), directory, progress)
        elif scheme == bucket.SCHEME:
            bucket.download(bucket.parse_bucket_folder(str(source)), directory, progress)
            yield directory
        else:
            raise InvalidArgument(
                f"{source} is not a source of adapters. Use a folder, an archive, "
                "hf://OWNER/NAME or s3://BUCKET/PREFIX. Download other addresses first."
            )


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that only this user can read. Raises ClientError if nothing can be written to it."""
    try:
        with tempfile.TemporaryDirectory(prefix="loraplex-") as name:
            yield Path(name)
    except OSError as exc:
        raise ClientError(f"{exc.filename or tempfile.gettempdir()}: {exc.strerror}") from exc
