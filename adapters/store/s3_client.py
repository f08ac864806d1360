"""Configures an S3 client: endpoint, timeouts and the meaning of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ObjectCorrupt, ObjectNotFound, StoreDenied, StoreUnavailable

MAX_CONNECTIONS = 80
"""More than the fetcher has threads, so that none waits for another's connection."""

_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_DENIED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})
_NO_BUCKET = "NoSuchBucket"
_CLOCK = "RequestTimeTooSkewed"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """The location of an S3 store and the client's options."""

    bucket: str
    prefix: str = ""
    """Prepended to every key, without slashes at its ends."""
    endpoint: str | None = None
    """None: AWS itself."""
    region: str | None = None
    addressing_style: str = "auto"
    """`auto`, `path` or `virtual`."""
    checksums: str = "when_supported"
    """`when_required` for servers that refuse the SDK's own checksums."""
    kms_key_id: str | None = None
    """Objects are encrypted with this key of the server's key management, if one is given."""
    bucket_owner: str | None = None
    """The account that the bucket must belong to; a bucket of another's is refused."""
    connect_timeout_seconds: float = 2.0
    read_timeout_seconds: float = 10.0
    """For a byte to arrive, not for the whole object."""
    max_attempts: int = 4
    """Per request; the SDK backs off in between."""

    @property
    def bucket_arguments(self) -> dict[str, str]:
        """The arguments of every request."""
        owner = {"ExpectedBucketOwner": self.bucket_owner} if self.bucket_owner else {}
        return {"Bucket": self.bucket, **owner}

    @property
    def encryption_arguments(self) -> dict[str, str]:
        """The arguments of every request that creates an object."""
        if self.kms_key_id is None:
            return {}
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key_id}


def connect(settings: S3Settings) -> Any:
    """A client of the AWS SDK; nothing is sent yet.

    It follows a server to the bucket's region, never to another bucket or host that an answer
    names.
    """
    import boto3
    from botocore.config import Config

    config = Config(
        signature_version="s3v4",
        connect_timeout=settings.connect_timeout_seconds,
        read_timeout=settings.read_timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": settings.max_attempts},
        max_pool_connections=MAX_CONNECTIONS,
        tcp_keepalive=True,
        s3={"addressing_style": settings.addressing_style},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
    )
    # A separate session: boto3's default session is shared and not thread-safe.
    return boto3.session.Session().client(
        "s3", endpoint_url=settings.endpoint, region_name=settings.region, config=config
    )


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Convert the SDK's errors to the store's errors, without request details and keys."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        FlexibleChecksumError,
        NoCredentialsError,
        PartialCredentialsError,
    )
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as exc:
        raise _meaning(exc.response) from exc
    except FlexibleChecksumError as exc:
        raise ObjectCorrupt("the received bytes do not match the store's own checksum") from exc
    except (NoCredentialsError, PartialCredentialsError) as exc:
        raise StoreDenied(
            "the credentials for the adapter store are missing or incomplete: set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role where "
            "`loraplex serve` runs"
        ) from exc
    except (BotoCoreError, Boto3Error, HTTPError) as exc:
        raise StoreUnavailable(f"the adapter store failed: {type(exc).__name__}") from exc


def _meaning(response: Any) -> ObjectNotFound | StoreDenied | StoreUnavailable:
    code = response.get("Error", {}).get("Code", "unknown")
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code in _MISSING:
        return ObjectNotFound()
    if code == _NO_BUCKET:
        return StoreDenied(
            "the adapter store has no such bucket: create it, or use another one with --store"
        )
    if code == _CLOCK:
        return StoreDenied("the adapter store denied access: this machine's clock is wrong")
    if status in (401, 403) or code in _DENIED:
        return StoreDenied(
            f"the adapter store denied access ({code}): check the credentials, the policies of the "
            "bucket and its key (get, put, delete, list, multipart) and the expected owner"
        )
    return StoreUnavailable(f"the adapter store refused: {code}")
