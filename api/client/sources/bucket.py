"""An adapter under a prefix of an S3 bucket.

It is read with the caller's credentials, as boto3 finds them: variables, a profile or a role.
AWS_ENDPOINT_URL chooses another server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InvalidAdapter, InvalidArgument, NotFound, SourceDenied, SourceUnavailable
from ..progress import Progress
from .listing import Listing, did_you_mean, join

SCHEME = "s3"
MAX_OBJECTS = 10_000
"""Listed below a prefix."""
_DENIED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """A prefix of a bucket, without slashes at its ends."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{SCHEME}://{self.bucket}/{self.prefix}".rstrip("/")


def parse_bucket_folder(address: str) -> BucketFolder:
    """Take `s3://BUCKET/PREFIX` apart. Raises InvalidArgument."""
    bucket, _, prefix = address.removeprefix(f"{SCHEME}://").partition("/")
    if not bucket:
        raise InvalidArgument(f"{address!r} is not an address in S3. Use s3://BUCKET/PREFIX.")
    return BucketFolder(bucket, prefix.strip("/"))


def download(wanted: BucketFolder, directory: Path, progress: Progress) -> None:
    """Download the adapter's files to the directory. Raises ClientError."""
    import boto3

    with _reaching(wanted):
        s3 = boto3.session.Session().client("s3")
        sizes = _sizes(s3, wanted)
        if not sizes:
            missing = NotFound(f"Not found: {wanted}")
            raise did_you_mean(missing, str(wanted), _beside(s3, wanted))
        listing = Listing(
            sizes.keys(), lambda folder: str(BucketFolder(wanted.bucket, _under(wanted, folder)))
        )
        for path in listing.files_of(listing.choose("")):
            file = directory / path.rpartition("/")[2]
            with progress.transfer(file.name, sizes[path]) as report:
                s3.download_file(
                    wanted.bucket, _under(wanted, path), str(file), Callback=_Sum(report)
                )


class _Sum:
    """Reports the sum of what it is called with."""

    def __init__(self, report: Any) -> None:
        self._report = report
        self._num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._report(self._num_bytes)


def _under(wanted: BucketFolder, path: str) -> str:
    return join(wanted.prefix, path).rstrip("/")


def _sizes(s3: Any, wanted: BucketFolder) -> dict[str, int]:
    """The bytes of each object under the prefix, by its path from there."""
    prefix = f"{wanted.prefix}/" if wanted.prefix else ""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=wanted.bucket, Prefix=prefix)
    listed = (entry for page in pages for entry in page.get("Contents", ()))
    entries = list(islice(listed, MAX_OBJECTS + 1))
    if len(entries) > MAX_OBJECTS:
        raise InvalidAdapter(
            f"{wanted} holds more than {MAX_OBJECTS} objects. Give the prefix of one adapter."
        )
    return {
        entry["Key"].removeprefix(prefix): entry["Size"]
        for entry in entries
        if not entry["Key"].endswith("/")
    }


def _beside(s3: Any, wanted: BucketFolder) -> list[str]:
    """The folders beside the one that is not there."""
    parent = wanted.prefix.rpartition("/")[0]
    found = s3.list_objects_v2(
        Bucket=wanted.bucket, Prefix=f"{parent}/" if parent else "", Delimiter="/"
    )
    return [
        str(BucketFolder(wanted.bucket, entry["Prefix"].rstrip("/")))
        for entry in found.get("CommonPrefixes", ())
    ]


@contextmanager
def _reaching(wanted: BucketFolder) -> Iterator[None]:
    """Convert the SDK's errors."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
    )

    try:
        yield
    except ClientError as exc:
        code = exc.response.get("Error", {}).get("Code", "unknown")
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if code == "NoSuchBucket":
            raise NotFound(f"There is no bucket {wanted.bucket!r}.") from exc
        if code in _DENIED or status in (401, 403):
            raise SourceDenied(
                f"S3 denied access to {wanted} ({code}): check your AWS credentials."
            ) from exc
        raise SourceUnavailable(f"S3 refused {wanted}: {code}") from exc
    except (NoCredentialsError, PartialCredentialsError) as exc:
        raise SourceDenied(
            "There are no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE."
        ) from exc
    except ParamValidationError as exc:
        raise InvalidArgument(f"{str(wanted)!r} is not an address in S3: {exc}") from exc
    except (BotoCoreError, Boto3Error) as exc:
        raise SourceUnavailable(f"S3 cannot be reached for {wanted}: {exc}") from exc
