"""An object store behind the S3 protocol: AWS, Ceph, Swift and what else speaks it.

Correctness needs nothing beyond put, get, head and delete: keys are content-addressed and objects
immutable, so no conditional writes, listings or ETags are relied on. Credentials come from the AWS
SDK's own chain (environment, profile, instance role), never from the store's URL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ObjectCorrupt, ObjectNotFound, StoreUnavailable
from .base import READ_BYTES, check_key, write_verified

CONNECT_TIMEOUT_SECONDS = 2
READ_TIMEOUT_SECONDS = 10
MAX_ATTEMPTS = 4
MAX_CONNECTIONS = 32
PART_BYTES = 16 << 20
"""Larger files are uploaded in parts of this size."""

_MISSING = {"404", "NoSuchKey", "NotFound"}


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where an S3 store is and how to speak to it."""

    bucket: str
    prefix: str = ""
    """Put before every key, without slashes at its ends."""
    endpoint: str | None = None
    """None: AWS itself."""
    region: str | None = None
    addressing_style: str = "auto"
    """`auto`, `path` or `virtual`."""
    checksums: str = "when_supported"
    """`when_required` for servers that refuse the SDK's own checksums."""


class S3Store:
    """Objects in one bucket. See `ObjectStore` for the contract."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._client = _connect(settings)

    def put_file(self, key: str, path: Path, *, sha256: str) -> None:
        from boto3.s3.transfer import TransferConfig

        with _reported():
            self._client.upload_file(
                str(path),
                self._settings.bucket,
                self._name(key),
                ExtraArgs={"Metadata": {"sha256": sha256}},
                Config=TransferConfig(
                    multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES
                ),
            )

    def fetch_file(
        self, key: str, path: Path, *, sha256: str, size_bytes: int, deadline: float | None = None
    ) -> None:
        with _reported():
            answer = self._client.get_object(Bucket=self._settings.bucket, Key=self._name(key))
            with contextlib.closing(answer["Body"]) as body:
                if answer["ContentLength"] != size_bytes:
                    raise ObjectCorrupt(
                        f"the stored object has {answer['ContentLength']} bytes "
                        f"instead of {size_bytes}"
                    )
                chunks = body.iter_chunks(READ_BYTES)
                write_verified(
                    chunks, path, sha256=sha256, size_bytes=size_bytes, deadline=deadline
                )

    def delete(self, key: str) -> None:
        with _reported():
            self._client.delete_object(Bucket=self._settings.bucket, Key=self._name(key))

    def exists(self, key: str) -> bool:
        try:
            with _reported():
                self._client.head_object(Bucket=self._settings.bucket, Key=self._name(key))
        except ObjectNotFound:
            return False
        return True

    def _name(self, key: str) -> str:
        prefix = self._settings.prefix
        return f"{prefix}/{check_key(key)}" if prefix else check_key(key)


def _connect(settings: S3Settings) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        signature_version="s3v4",
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=READ_TIMEOUT_SECONDS,
        retries={"mode": "standard", "max_attempts": MAX_ATTEMPTS},
        max_pool_connections=MAX_CONNECTIONS,
        tcp_keepalive=True,
        s3={"addressing_style": settings.addressing_style},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
    )
    # A session of its own: boto3's default one is shared and not safe to use from threads.
    return boto3.session.Session().client(
        "s3", endpoint_url=settings.endpoint, region_name=settings.region, config=config
    )


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turn the SDK's errors into the store's, without what they say about requests and keys."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as exc:
        code = exc.response.get("Error", {}).get("Code", "unknown")
        if code in _MISSING:
            raise ObjectNotFound() from exc
        raise StoreUnavailable(f"the adapter store refused: {code}") from exc
    except (BotoCoreError, Boto3Error) as exc:
        raise StoreUnavailable(f"the adapter store failed: {type(exc).__name__}") from exc
