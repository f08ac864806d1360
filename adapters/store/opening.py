"""Opens the object store that `--store` names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from .base import ObjectStore
from .local import LocalStore
from .s3 import S3Store
from .s3_client import S3Settings


def _text(value: str) -> str:
    if not value:
        raise ValueError("needs a value")
    return value


def _one_of(*values: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return value

    return read


def _seconds(value: str) -> float:
    seconds = float(value) if value.replace(".", "", 1).isdigit() else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError("must be a number of seconds above 0")
    return seconds


def _attempts(value: str) -> int:
    if not value.isdigit() or not 1 <= int(value) <= 100:
        raise ValueError("must be a whole number from 1 to 100")
    return int(value)


class _Option(NamedTuple):
    field: str
    """The field of S3Settings."""
    read: Callable[[str], Any] = _text


_S3_OPTIONS: Mapping[str, _Option] = {
    "endpoint": _Option("endpoint"),
    "region": _Option("region"),
    "addressing_style": _Option("addressing_style", _one_of("auto", "path", "virtual")),
    "checksums": _Option("checksums", _one_of("when_supported", "when_required")),
    "kms": _Option("kms_key_id"),
    "owner": _Option("bucket_owner"),
    "connect_timeout": _Option("connect_timeout_seconds", _seconds),
    "read_timeout": _Option("read_timeout_seconds", _seconds),
    "max_attempts": _Option("max_attempts", _attempts),
}


def open_store(
    url: str, *, reserve_bytes: int | None = None, reserve_file: Path | None = None
) -> ObjectStore:
    """Open a store by a path, `file:///directory` or `s3://bucket/prefix`.

    An S3 URL takes options, as in `s3://b/p?endpoint=http://host:9000&addressing_style=path`:
    `endpoint`, `region`, `addressing_style` (auto, path, virtual), `checksums` (when_supported,
    when_required), `kms` (the id of the key that objects are encrypted with), `owner` (the account
    that the bucket must belong to), `connect_timeout` and `read_timeout` in seconds, and
    `max_attempts` of one request.

    `reserve_bytes` and `reserve_file` say what a folder's store leaves free (`DiskRoom`).

    Raises ValueError if the URL is malformed, StoreUnavailable if the folder cannot be made.
    """
    parts = urlsplit(url)
    if "://" not in url or parts.scheme == "file":
        directory = _local_path(parts) if "://" in url else Path(url).expanduser()
        return LocalStore(directory, reserve_bytes=reserve_bytes, reserve_file=reserve_file)
    if parts.scheme == "s3":
        return S3Store(_s3_settings(parts))
    raise ValueError(f"not an adapter store: {url!r}; use a path, file:///... or s3://...")


def _local_path(parts: SplitResult) -> Path:
    if parts.netloc or not parts.path.startswith("/") or parts.query:
        raise ValueError("a file store must be file:/// and an absolute path")
    return Path(unquote(parts.path))


def _s3_settings(parts: SplitResult) -> S3Settings:
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if unknown := options.keys() - _S3_OPTIONS.keys():
        raise ValueError(f"unknown options of the S3 store: {', '.join(sorted(unknown))}")
    if not parts.netloc or "@" in parts.netloc:
        raise ValueError("an S3 store must be s3://bucket/prefix, without credentials")
    fields = {_S3_OPTIONS[name].field: _option_value(name, text) for name, text in options.items()}
    return S3Settings(bucket=parts.netloc, prefix=parts.path.strip("/"), **fields)


def _option_value(name: str, text: str) -> Any:
    """Raises ValueError naming the option, unless `text` is a value of it."""
    try:
        return _S3_OPTIONS[name].read(text)
    except ValueError as exc:
        raise ValueError(f"the S3 store's option {name} {exc}") from None
