"""From the operator's `--store` to an object store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from .base import ObjectStore
from .local import LocalStore
from .s3 import S3Settings, S3Store

_S3_OPTIONS = {"endpoint", "region", "addressing_style", "checksums"}


def open_store(url: str) -> ObjectStore:
    """Open a store by a path, `file:///directory` or `s3://bucket/prefix`.

    An S3 URL takes the options `endpoint`, `region`, `addressing_style` (auto, path, virtual) and
    `checksums` (when_supported, when_required), as in `s3://b/p?endpoint=http://host:9000`.

    Raises ValueError if the URL is malformed, StoreUnavailable if the folder cannot be made.
    """
    parts = urlsplit(url)
    if "://" not in url:
        return LocalStore(Path(url).expanduser())
    if parts.scheme == "file":
        return LocalStore(_local_path(parts))
    if parts.scheme == "s3":
        return S3Store(_s3_settings(parts))
    raise ValueError(f"not an adapter store: {url!r}; use a path, file:///... or s3://...")


def _local_path(parts: SplitResult) -> Path:
    if parts.netloc or not parts.path.startswith("/") or parts.query:
        raise ValueError("a file store is file:/// and an absolute path")
    return Path(unquote(parts.path))


def _s3_settings(parts: SplitResult) -> S3Settings:
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if unknown := options.keys() - _S3_OPTIONS:
        raise ValueError(f"unknown options of the S3 store: {', '.join(sorted(unknown))}")
    if not parts.netloc or "@" in parts.netloc:
        raise ValueError("an S3 store is s3://bucket/prefix, without credentials")
    return S3Settings(bucket=parts.netloc, prefix=parts.path.strip("/"), **options)
