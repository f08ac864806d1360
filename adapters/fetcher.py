"""Downloads adapter blocks from the store to the disk cache, in its own threads.

Concurrent requests for one adapter share one download. Different adapters are downloaded in
parallel, and tenants take turns. Every returned file has been verified against the SHA-256 that the
control plane recorded.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

from .disk_cache import DiskCache
from .errors import AdapterUnavailable, ObjectCorrupt, ObjectNotFound, StoreUnavailable
from .identity import AdapterKey
from .store import ObjectStore, object_key
from .tenant_threads import TenantThreads
from .tier import Tier

MAX_ATTEMPTS = 2
"""A damaged or interrupted transfer is tried again once, from the store itself."""
MAX_TRANSFERS = 48
"""Concurrent transfers. A transfer mostly waits for the store, so slow ones must not delay the
others."""
MAX_TRANSFERS_OF_TENANT = min(max(2, os.cpu_count() or 1), MAX_TRANSFERS // 2)
"""Fetched adapters are verified, read, copied and served by the processors that serve all tenants:
with more concurrent transfers, one tenant's cold adapters leave too little for the others (decision
41)."""

TRANSFER_SECONDS = 120.0
"""For one block, second attempt included."""


class FetchedBlock(NamedTuple):
    """A verified block on the local disk."""

    path: Path
    tier: Tier
    """The tier in which it was found: Tier.DISK or Tier.STORE."""
    seconds: float = 0.0
    """Time from the first request to the complete file."""


class BlockSource(Protocol):
    """A source of blocks for this machine's disk: a Fetcher, or the client of a fetcher process."""

    def fetch(self, key: AdapterKey, *, sha256: str, size_bytes: int) -> Future[FetchedBlock]: ...

    def note_read(self, key: AdapterKey) -> None: ...

    def forget(self, key: AdapterKey) -> None: ...


class Fetcher:
    """Fetches blocks; owns the threads, not the store or the cache."""

    def __init__(
        self,
        store: ObjectStore,
        disk_cache: DiskCache,
        *,
        max_workers: int = MAX_TRANSFERS,
        max_of_tenant: int = MAX_TRANSFERS_OF_TENANT,
        deadline_seconds: float = TRANSFER_SECONDS,
    ) -> None:
        """`deadline_seconds` bounds one block's transfer, second attempt included."""
        self._store = store
        self._disk_cache = disk_cache
        self._deadline_seconds = deadline_seconds
        self._threads = TenantThreads("adapter-fetcher", max_workers, max_held=max_of_tenant)
        self._lock = threading.Lock()
        self._flights: dict[AdapterKey, Future[FetchedBlock]] = {}
        self._forgotten: set[AdapterKey] = set()

    def fetch(self, key: AdapterKey, *, sha256: str, size_bytes: int) -> Future[FetchedBlock]:
        """Fetch a block to the disk cache unless it is there, or join a running transfer.

        Each caller has its own future: cancelling it does not affect the others. It fails with
        ObjectNotFound, ObjectCorrupt, StoreUnavailable, or AdapterUnavailable if the disk cannot
        take the block.
        """
        waiter: Future[FetchedBlock] = Future()
        with self._lock:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._threads.submit(
                    key.tenant_id, self._fly, key, sha256, size_bytes, time.monotonic()
                )
                self._flights[key] = flight
        flight.add_done_callback(lambda done: _pass_on(done, waiter))
        return waiter

    def forget(self, key: AdapterKey) -> None:
        """Delete the local copy; a running transfer ends with ObjectNotFound and leaves none."""
        with self._lock:
            if key in self._flights:
                self._forgotten.add(key)
            self._disk_cache.remove(key)

    def note_read(self, key: AdapterKey) -> None:
        """The local copy may be evicted from now on."""
        self._disk_cache.note_read(key)

    def close(self) -> None:
        """Finish the running transfers and end the threads; waiting transfers are cancelled."""
        self._threads.close()

    def _fly(self, key: AdapterKey, sha256: str, size_bytes: int, asked_at: float) -> FetchedBlock:
        try:
            block = self._locate(key, sha256, size_bytes)
            return block._replace(seconds=time.monotonic() - asked_at)
        except OSError as exc:
            raise AdapterUnavailable(f"this machine's disk failed: {exc.strerror}") from exc
        finally:
            self._land(key)

    def _land(self, key: AdapterKey) -> None:
        """End the flight. Raises ObjectNotFound if the adapter was deleted meanwhile."""
        with self._lock:
            del self._flights[key]
            if key not in self._forgotten:
                return
            self._forgotten.discard(key)
            self._disk_cache.remove(key)
        raise ObjectNotFound("the adapter was deleted while it was fetched")

    def _locate(self, key: AdapterKey, sha256: str, size_bytes: int) -> FetchedBlock:
        cached = self._disk_cache.get(key, sha256=sha256, size_bytes=size_bytes)
        if cached is not None:
            return FetchedBlock(cached, Tier.DISK)
        deadline = time.monotonic() + self._deadline_seconds

        def download(path: Path) -> None:
            self._download(key, path, sha256=sha256, size_bytes=size_bytes, deadline=deadline)

        return FetchedBlock(self._disk_cache.add(key, size_bytes, download), Tier.STORE)

    def _download(
        self, key: AdapterKey, path: Path, *, sha256: str, size_bytes: int, deadline: float
    ) -> None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self._store.fetch_file(
                    object_key(key), path, sha256=sha256, size_bytes=size_bytes, deadline=deadline
                )
                return
            except (ObjectCorrupt, StoreUnavailable):
                if attempt == MAX_ATTEMPTS or time.monotonic() > deadline:
                    raise


def _pass_on(flight: Future[FetchedBlock], waiter: Future[FetchedBlock]) -> None:
    """Give a waiter its flight's outcome."""
    if not waiter.set_running_or_notify_cancel():
        return
    if flight.cancelled():
        waiter.set_exception(StoreUnavailable("the fetcher is closing"))
    elif error := flight.exception():
        waiter.set_exception(error)
    else:
        waiter.set_result(flight.result())
