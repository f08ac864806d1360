"""Uploads a large file to S3 in parts, and resumes an earlier attempt.

The server keeps the parts of an unfinished upload, which are found by the object's name. A part is
sent again unless the server reports its size and MD5. The MD5 only saves time: the store compares
the finished object with the expected one, and readers check its SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from .base import OnProgress

_SDK_CHECKSUM = "CRC32"


class KnownPart(NamedTuple):
    """A part that the server has."""

    size_bytes: int
    etag: str
    checksum: str | None


class PartedUpload:
    """The upload of a file as one object."""

    def __init__(
        self,
        client: Any,
        *,
        where: Mapping[str, str],
        creation: Mapping[str, Any],
        part_bytes: int,
        has_sdk_checksums: bool,
        on_progress: OnProgress,
    ) -> None:
        """`where`: bucket and key as request arguments. `creation`: the additional arguments of the
        request that creates the object. With `has_sdk_checksums` the server checks each part by the
        SDK's checksum, otherwise by its MD5."""
        self._client = client
        self._where = where
        self._creation = creation
        self._part_bytes = part_bytes
        self._has_sdk_checksums = has_sdk_checksums
        self._on_progress = on_progress

    def run(self, path: Path, *, upload_id: str | None) -> None:
        """Send the parts that the server lacks of `upload_id`, or everything in a new upload."""
        known = self._known_parts(upload_id) if upload_id else {}
        upload_id = upload_id or self._create()
        parts: list[dict[str, Any]] = []
        with path.open("rb") as file:
            while data := file.read(self._part_bytes):
                number = len(parts) + 1
                parts.append(self._send(upload_id, number, data, known.get(number)))
                self._on_progress(file.tell())
        self._client.complete_multipart_upload(
            **self._where, UploadId=upload_id, MultipartUpload={"Parts": parts}
        )

    def abort(self, upload_id: str) -> None:
        """Make the server delete the parts of an upload."""
        self._client.abort_multipart_upload(**self._where, UploadId=upload_id)

    def _create(self) -> str:
        checksum = {"ChecksumAlgorithm": _SDK_CHECKSUM} if self._has_sdk_checksums else {}
        created = self._client.create_multipart_upload(**self._where, **self._creation, **checksum)
        upload_id: str = created["UploadId"]
        return upload_id

    def _known_parts(self, upload_id: str) -> dict[int, KnownPart]:
        pages = self._client.get_paginator("list_parts").paginate(**self._where, UploadId=upload_id)
        return {
            part["PartNumber"]: KnownPart(
                part["Size"], part["ETag"].strip('"'), part.get(f"Checksum{_SDK_CHECKSUM}")
            )
            for page in pages
            for part in page.get("Parts", ())
        }

    def _send(
        self, upload_id: str, number: int, data: bytes, known: KnownPart | None
    ) -> dict[str, Any]:
        """The part as the completion names it; it is sent unless the server has it."""
        md5 = hashlib.md5(data, usedforsecurity=False)
        if known and (known.size_bytes, known.etag) == (len(data), md5.hexdigest()):
            return _named(number, known.etag, known.checksum)
        check = (
            {"ChecksumAlgorithm": _SDK_CHECKSUM}
            if self._has_sdk_checksums
            else {"ContentMD5": base64.b64encode(md5.digest()).decode()}
        )
        answer = self._client.upload_part(
            **self._where, UploadId=upload_id, PartNumber=number, Body=data, **check
        )
        return _named(number, answer["ETag"], answer.get(f"Checksum{_SDK_CHECKSUM}"))


def _named(number: int, etag: str, checksum: str | None) -> dict[str, Any]:
    named = {"PartNumber": number, "ETag": etag}
    return {**named, f"Checksum{_SDK_CHECKSUM}": checksum} if checksum else named


def file_md5(file: BufferedReader) -> str:
    """A file's MD5 as the header Content-MD5 has it."""
    digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).digest()
    return base64.b64encode(digest).decode()
