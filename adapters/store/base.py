"""The object store interface: one immutable object per adapter version, file or checkpoint."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import ObjectCorrupt, StoreUnavailable
from ..identity import DIGEST_PREFIX, AdapterKey
from ..wiping import write_all

READ_BYTES = 1 << 16
"""Small, so that a deadline is noticed while a slow object trickles in."""

_SEGMENT_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
OBJECT_PREFIX = "t/"
"""The prefix of the keys of all tenants' objects."""
_BLOCK_SUFFIX = ".block"
_HEX_CHARACTERS = frozenset("0123456789abcdef")


OnProgress = Callable[[int], None]
"""Called with the number of bytes of a file that have been sent so far."""


class StoredObject(NamedTuple):
    """One object in a listing."""

    key: str
    size_bytes: int
    modified_at: float
    """Seconds since 1970, by the store's clock."""


class ObjectStore(Protocol):
    """Objects under keys such as `t/<tenant>/a/<digest>.block`. Safe to use from many threads.

    Every method raises StoreUnavailable if the store does not answer, StoreDenied if it refuses
    this server, and ValueError for a key that `check_key` refuses.
    """

    def put_file(
        self, key: str, path: Path, *, sha256: str, on_progress: OnProgress | None = None
    ) -> None:
        """Store a file under a key, completely or not at all; storing equal content again has no
        effect.

        When this returns, the object is durable. `sha256` is the file's hex digest, stored with it.
        The next call may use the parts that an interrupted call has sent. Raises StorageFull if a
        store on this machine has no room. `on_progress` is called in this thread, at the end with
        the file's size.
        """

    def fetch_file(
        self, key: str, path: Path, *, sha256: str, size_bytes: int, deadline: float | None = None
    ) -> None:
        """Write an object to `path`, which is complete and verified when this returns.

        `deadline` is a time of `time.monotonic`. Raises ObjectNotFound, or ObjectCorrupt if size or
        content differ from the expected ones; the caller then deletes the file at `path`.
        """

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is no error."""

    def exists(self, key: str) -> bool:
        """Whether there is an object under this key."""

    def list_keys(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        """The objects whose keys begin with `prefix` and are greater than `after`, in order.

        For garbage collection only: a store may list new and deleted objects late.
        """

    def remove_abandoned(self, *, older_than_seconds: float) -> int:
        """Delete unfinished uploads that started longer ago; returns how many there were."""


def object_key(key: AdapterKey) -> str:
    """The store's key of an adapter version's block."""
    hex_digest = key.digest.removeprefix(DIGEST_PREFIX)
    if len(hex_digest) != 64 or not _HEX_CHARACTERS.issuperset(hex_digest):
        raise ValueError(f"not an adapter digest: {key.digest!r}")
    if not key.tenant_id or "/" in key.tenant_id:
        raise ValueError(f"not a tenant id: {key.tenant_id!r}")
    return check_key(f"{OBJECT_PREFIX}{key.tenant_id}/a/{hex_digest}{_BLOCK_SUFFIX}")


def adapter_key(key: str) -> AdapterKey | None:
    """The adapter version whose block has this key; None if the key is not Loraplex's."""
    match key.split("/"):
        case ["t", tenant_id, "a", name] if name.endswith(_BLOCK_SUFFIX):
            digest = name.removesuffix(_BLOCK_SUFFIX)
            if len(digest) == 64 and _HEX_CHARACTERS.issuperset(digest):
                return AdapterKey(tenant_id, DIGEST_PREFIX + digest)
    return None


def file_key(tenant_id: str, file_id: str, sha256: str) -> str:
    """The store's key of a tenant's file, named by its id and its content."""
    return check_key(f"{OBJECT_PREFIX}{tenant_id}/f/{file_id}/{sha256}")


def file_of_key(key: str) -> tuple[str, str] | None:
    """The tenant and the id of the file with this key; None if it is not a file's."""
    match key.split("/"):
        case ["t", tenant_id, "f", file_id, _]:
            return tenant_id, file_id
    return None


def part_key(tenant_id: str, upload_id: str, part_id: str) -> str:
    """The store's key of a part of an unfinished upload."""
    return check_key(f"{OBJECT_PREFIX}{tenant_id}/u/{upload_id}/{part_id}")


def part_of_key(key: str) -> tuple[str, str, str] | None:
    """The tenant, the upload and the part with this key; None if it is not a part's."""
    match key.split("/"):
        case ["t", tenant_id, "u", upload_id, part_id]:
            return tenant_id, upload_id, part_id
    return None


def checkpoint_key(tenant_id: str, checkpoint_id: str, sha256: str) -> str:
    """The store's key of a checkpoint of a fine-tuning job, named by its id and its content."""
    return check_key(f"{OBJECT_PREFIX}{tenant_id}/c/{checkpoint_id}/{sha256}")


def checkpoint_of_key(key: str) -> tuple[str, str] | None:
    """The tenant and the id of the checkpoint with this key; None if it is not a checkpoint's."""
    match key.split("/"):
        case ["t", tenant_id, "c", checkpoint_id, _]:
            return tenant_id, checkpoint_id
    return None


def check_key(key: str) -> str:
    """The key itself. Raises ValueError unless it is a plain relative path."""
    for segment in key.split("/"):
        if not segment or segment[0] == "." or not _SEGMENT_CHARACTERS.issuperset(segment):
            raise ValueError(f"not an object key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """The beginning of a key itself. Raises ValueError unless some plain key begins so."""
    check_key(f"{prefix}x")
    return prefix


def write_verified(
    chunks: Iterable[bytes | memoryview],
    path: Path,
    *,
    sha256: str,
    size_bytes: int,
    deadline: float | None,
) -> None:
    """Write the chunks to `path`, make them durable, and check their number and SHA-256.

    Never writes more than `size_bytes`. Raises ObjectCorrupt, or StoreUnavailable past `deadline`.
    """
    hasher, received = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            received += len(chunk)
            if received > size_bytes:
                raise ObjectCorrupt(f"the stored object is longer than {size_bytes} bytes")
            if deadline is not None and time.monotonic() > deadline:
                raise StoreUnavailable("the adapter store was too slow to send the object")
            hasher.update(chunk)
            write_all(file, chunk)
        os.fsync(file.fileno())
    if received != size_bytes:
        raise ObjectCorrupt(f"the stored object has {received} bytes instead of {size_bytes}")
    if hasher.hexdigest() != sha256:
        raise ObjectCorrupt("the stored object's bytes do not match its SHA-256")
