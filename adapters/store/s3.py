"""An object store with the S3 protocol: AWS, Ceph, Swift and others.

Correctness needs only put, get, head and delete: keys are content-addressed and objects immutable,
so conditional writes, listings and ETags are not relied on. Credentials come from the AWS SDK's
default chain (environment, profile, instance role), never from the store's URL.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import AdapterError, ObjectCorrupt, ObjectNotFound, StoreDenied, StoreUnavailable
from .base import (
    READ_BYTES,
    OnProgress,
    StoredObject,
    check_key,
    check_prefix,
    write_verified,
)
from .s3_client import S3Settings, connect, reported
from .s3_upload import PartedUpload, file_md5

PART_BYTES = 16 << 20
"""Larger files are uploaded in parts of this size."""

_log = logging.getLogger(__name__)


class S3Store:
    """Objects in one bucket. See `ObjectStore` for the contract."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._client = connect(settings)

    def put_file(
        self, key: str, path: Path, *, sha256: str, on_progress: OnProgress | None = None
    ) -> None:
        report = on_progress or _ignore
        size_bytes = path.stat().st_size
        if size_bytes > PART_BYTES:
            self._put_in_parts(key, path, sha256=sha256, on_progress=report)
        else:
            self._put_at_once(key, path, sha256=sha256)
            report(size_bytes)
        self._check_stored(key, sha256=sha256, size_bytes=size_bytes)

    def fetch_file(
        self, key: str, path: Path, *, sha256: str, size_bytes: int, deadline: float | None = None
    ) -> None:
        with reported():
            answer = self._client.get_object(**self._where(key))
            with contextlib.closing(answer["Body"]) as body:
                announced = answer.get("ContentLength", size_bytes)
                if announced != size_bytes:
                    raise ObjectCorrupt(
                        f"the stored object has {announced} bytes instead of {size_bytes}"
                    )
                write_verified(
                    _chunks(body, announced),
                    path,
                    sha256=sha256,
                    size_bytes=size_bytes,
                    deadline=deadline,
                )

    def delete(self, key: str) -> None:
        with reported():
            self._client.delete_object(**self._where(key))

    def exists(self, key: str) -> bool:
        try:
            self._head(key)
        except ObjectNotFound:
            return False
        return True

    def list_keys(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        start = {"StartAfter": self._full_prefix(after)} if after else {}
        for page in self._pages("list_objects_v2", Prefix=self._full_prefix(prefix), **start):
            for found in page.get("Contents", ()):
                key = found["Key"][len(self._full_prefix("")) :]
                if key > after:  # in case the server knows no StartAfter
                    yield StoredObject(key, found["Size"], found["LastModified"].timestamp())

    def remove_abandoned(self, *, older_than_seconds: float) -> int:
        oldest = time.time() - older_than_seconds
        num_removed = 0
        for upload in self._unfinished(self._full_prefix("")):
            if upload["Initiated"].timestamp() < oldest:
                with reported():
                    self._client.abort_multipart_upload(
                        **self._settings.bucket_arguments,
                        Key=upload["Key"],
                        UploadId=upload["UploadId"],
                    )
                num_removed += 1
        return num_removed

    # --- inside -----------------------------------------------------------------------------------

    def _put_at_once(self, key: str, path: Path, *, sha256: str) -> None:
        with path.open("rb") as file, reported():
            check = {} if self._has_sdk_checksums else {"ContentMD5": file_md5(file)}
            file.seek(0)
            self._client.put_object(
                **self._where(key), **self._creation(sha256), **check, Body=file
            )

    def _put_in_parts(self, key: str, path: Path, *, sha256: str, on_progress: OnProgress) -> None:
        upload = PartedUpload(
            self._client,
            where=self._where(key),
            creation=self._creation(sha256),
            part_bytes=PART_BYTES,
            has_sdk_checksums=self._has_sdk_checksums,
            on_progress=on_progress,
        )
        begun = self._begun_uploads(key)
        if begun and self._resume(upload, key, path, begun[0], sha256=sha256):
            abandoned = begun[1:]
        else:
            with reported():
                upload.run(path, upload_id=None)
            abandoned = begun
        for upload_id in abandoned:
            with contextlib.suppress(AdapterError), reported():
                upload.abort(upload_id)

    def _resume(
        self, upload: PartedUpload, key: str, path: Path, upload_id: str, *, sha256: str
    ) -> bool:
        """Whether the object could be completed from the parts of an earlier attempt and the
        rest."""
        try:
            with reported():
                upload.run(path, upload_id=upload_id)
            self._check_stored(key, sha256=sha256, size_bytes=path.stat().st_size)
        except (StoreUnavailable, ObjectNotFound) as exc:
            # Finished by another process meanwhile, of other content, or refused by the server.
            _log.info("upload_not_resumed", extra={"reason": str(exc)})
            return False
        return True

    def _begun_uploads(self, key: str) -> list[str]:
        """Ids of unfinished uploads of this object, oldest first; empty if the server does not list
        them."""
        name = self._name(key)
        try:
            begun = [upload for upload in self._unfinished(name) if upload["Key"] == name]
        except (StoreDenied, StoreUnavailable):
            return []  # the upload itself reports the error, if any
        begun.sort(key=lambda upload: (upload["Initiated"], upload["UploadId"]))
        return [upload["UploadId"] for upload in begun]

    def _unfinished(self, prefix: str) -> Iterator[Any]:
        for page in self._pages("list_multipart_uploads", Prefix=prefix):
            yield from page.get("Uploads", ())

    def _check_stored(self, key: str, *, sha256: str, size_bytes: int) -> None:
        """Raise StoreUnavailable unless the object is the one that was sent, by size and name."""
        try:
            head = self._head(key)
        except ObjectNotFound as exc:
            raise StoreUnavailable("the adapter store did not keep what it acknowledged") from exc
        if (head["ContentLength"], head["Metadata"].get("sha256")) != (size_bytes, sha256):
            raise StoreUnavailable("the adapter store holds another object than the one sent")

    def _head(self, key: str) -> Any:
        with reported():
            return self._client.head_object(**self._where(key))

    def _pages(self, operation: str, **arguments: str) -> Iterator[Any]:
        pages = self._client.get_paginator(operation).paginate(
            **self._settings.bucket_arguments, **arguments
        )
        remaining = iter(pages)
        while True:
            with reported():
                page = next(remaining, None)
            if page is None:
                return
            yield page

    @property
    def _has_sdk_checksums(self) -> bool:
        return self._settings.checksums == "when_supported"

    def _creation(self, sha256: str) -> dict[str, Any]:
        return {"Metadata": {"sha256": sha256}, **self._settings.encryption_arguments}

    def _where(self, key: str) -> dict[str, str]:
        return {**self._settings.bucket_arguments, "Key": self._name(key)}

    def _name(self, key: str) -> str:
        return f"{self._full_prefix('')}{check_key(key)}"

    def _full_prefix(self, prefix: str) -> str:
        own = f"{self._settings.prefix}/" if self._settings.prefix else ""
        return f"{own}{check_prefix(prefix)}"


def _chunks(body: Any, num_bytes: int) -> Iterator[bytes]:
    """The object as it arrives.

    The SDK's own methods are not used: they wait for a whole chunk, so a deadline would go
    unnoticed while an object trickles in.
    """
    num_received = 0
    while data := body._raw_stream.read1(READ_BYTES):
        num_received += len(data)
        yield data
    if num_received < num_bytes:
        raise StoreUnavailable("the adapter store ended the connection within the object")


def _ignore(_sent_bytes: int) -> None:
    pass
