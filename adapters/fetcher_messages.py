"""Messages between the server and the fetcher process: length-prefixed JSON.

Every call has a number, and its answer has the same number. Both sides check messages against these
types when they read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import msgspec

from .disk_cache import DiskCacheStats
from .errors import (
    AdapterError,
    AdapterUnavailable,
    ObjectCorrupt,
    ObjectNotFound,
    StorageFull,
    StoreDenied,
    StoreUnavailable,
)
from .identity import AdapterKey
from .json_frames import decode, in_frame
from .store import StoredObject
from .tier import Tier

NO_CALL = 0
"""The call id of messages that answer no call."""
INVALID_STORE = "invalid_store"
"""Code of an answer to Open: the store's URL is malformed."""

_ERRORS = {
    error.code: error
    for error in (
        AdapterUnavailable,
        ObjectCorrupt,
        ObjectNotFound,
        StorageFull,
        StoreDenied,
        StoreUnavailable,
    )
}


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A call, an answer or a note."""

    call_id: int


# --- to the fetcher -----------------------------------------------------------------------------


class Open(Message, frozen=True):
    """The first message: the store and the folder to use."""

    store_url: str
    cache_directory: str
    capacity_bytes: int
    reserve_bytes: int | None
    reserve_file: str | None
    """As in `DiskRoom`."""
    transfer_seconds: float
    """The time limit for one block."""


class Fetch(Message, frozen=True):
    """Bring a block to the disk. Answered by Fetched."""

    key: AdapterKey
    sha256: str
    size_bytes: int


class NoteRead(Message, frozen=True):
    """The fetched file has been read and may be evicted. Not answered."""

    key: AdapterKey


class Forget(Message, frozen=True):
    """Delete the local copy. Answered by Done."""

    key: AdapterKey


class Trim(Message, frozen=True):
    """`DiskCache.trim`. Answered by Counted: how many bytes."""

    num_bytes: int
    keep_bytes: int


class PutFile(Message, frozen=True):
    """`ObjectStore.put_file`. Answered by Sent, again and again, and Done."""

    key: str
    path: str
    sha256: str


class FetchFile(Message, frozen=True):
    """`ObjectStore.fetch_file`. Answered by Done."""

    key: str
    path: str
    sha256: str
    size_bytes: int
    seconds: float | None
    """Until the deadline."""


class Delete(Message, frozen=True):
    """`ObjectStore.delete`. Answered by Done."""

    key: str


class Exists(Message, frozen=True):
    """`ObjectStore.exists`. Answered by Counted: 0 or 1."""

    key: str


class ListPage(Message, frozen=True):
    """The next objects of `ObjectStore.list_keys`. Answered by Listed."""

    prefix: str
    after: str
    max_objects: int


class RemoveAbandoned(Message, frozen=True):
    """`ObjectStore.remove_abandoned`. Answered by Counted."""

    older_than_seconds: float


# --- from the fetcher ---------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The store is opened, the cache is read."""


class Note(Message, frozen=True):
    """Sent without a request, as a heartbeat, and before the answer of a call that changes it."""

    disk: DiskCacheStats


class Fetched(Message, frozen=True):
    path: str
    tier: Tier
    seconds: float


class Sent(Message, frozen=True):
    num_bytes: int


class Done(Message, frozen=True):
    pass


class Counted(Message, frozen=True):
    number: int


class Listed(Message, frozen=True):
    objects: list[StoredObject]
    """In the order of their keys; fewer than asked for at the end."""


class Failed(Message, frozen=True):
    code: str
    message: str

    def as_error(self) -> Exception:
        """The error as it was raised in the fetcher."""
        if self.code == INVALID_STORE:
            return ValueError(self.message)
        return _ERRORS.get(self.code, AdapterUnavailable)(self.message)


ToFetcher: TypeAlias = (
    Open
    | Fetch
    | NoteRead
    | Forget
    | Trim
    | PutFile
    | FetchFile
    | Delete
    | Exists
    | ListPage
    | RemoveAbandoned
)
FromFetcher: TypeAlias = Ready | Note | Fetched | Sent | Done | Counted | Listed | Failed

_TO_FETCHER: msgspec.json.Decoder[ToFetcher] = msgspec.json.Decoder(ToFetcher)
_FROM_FETCHER: msgspec.json.Decoder[FromFetcher] = msgspec.json.Decoder(FromFetcher)


def encode(message: ToFetcher | FromFetcher) -> bytes:
    """The message in its wire format."""
    return in_frame(message)


def decode_to_fetcher(content: bytes) -> ToFetcher:
    """Raises MessageRefused."""
    return decode(_TO_FETCHER, content)


def decode_from_fetcher(content: bytes) -> FromFetcher:
    """Raises MessageRefused."""
    return decode(_FROM_FETCHER, content)


def as_failure(call_id: int, error: AdapterError | OSError) -> Failed:
    """The message of an error for the caller."""
    if isinstance(error, OSError):
        return Failed(
            call_id, AdapterUnavailable.code, f"this machine's disk failed: {error.strerror}"
        )
    return Failed(call_id, error.code, str(error))


def read_path(path: Path) -> str:
    """A path that both processes read alike."""
    return str(path.absolute())
