"""Reservations of this server's disk for unfinished uploads.

An upload reserves its declared size when it is opened, so an accepted upload always fits. Each data
folder has one server, which keeps the budget in memory and reads it from the database at start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ...adapters.errors import StorageFull
from ...platform.errors import DiskShareExceeded

STAGING_PART = 4
"""Uploads may use this fraction of the disk (one in this number)."""
STORE_SHARE = 8
"""A tenant may store at most this many times what it leaves to others."""
EXAMINATION_COPIES = 2
"""During examination an upload exists three times: as sent, as a block, and in the store."""


class Hold(NamedTuple):
    """One upload's reservation of the disk."""

    upload_id: str
    tenant_id: str
    num_bytes: int
    """As declared."""


class StagingBudget:
    """Limits on unfinished uploads, in total and per tenant. Thread-safe.

    A tenant may hold `tenant_bytes`, and at most as much as it leaves to the others: half of the
    budget if it is alone, a third next to one other such tenant. So there is always room for a
    tenant that holds nothing.
    """

    def __init__(
        self,
        *,
        total_bytes: int,
        tenant_bytes: int | None,
        free_bytes: Callable[[], int],
        written_bytes: Callable[[str], int],
    ) -> None:
        """`free_bytes`: the bytes that uploads may still write to the disk; negative if it is too
        full.

        `written_bytes`: the written bytes of an upload.
        """
        self.total_bytes = total_bytes
        self.tenant_bytes = total_bytes // 2 if tenant_bytes is None else tenant_bytes
        self._free_bytes = free_bytes
        self._written_bytes = written_bytes
        self._lock = threading.Lock()
        self._holds: dict[str, Hold] = {}
        self._written_now = 0
        """Reserved by `writing`."""

    @property
    def max_upload_bytes(self) -> int:
        """The largest upload that a tenant may declare while no tenant holds anything."""
        return min(self.tenant_bytes, self.total_bytes // 2)

    @property
    def held_bytes(self) -> int:
        """The bytes reserved for all uploads."""
        with self._lock:
            return sum(hold.num_bytes for hold in self._holds.values())

    @property
    def held_ids(self) -> frozenset[str]:
        """The uploads that hold something."""
        with self._lock:
            return frozenset(self._holds)

    def is_held(self, upload_id: str) -> bool:
        return upload_id in self._holds

    def hold(self, wanted: Hold, *, stored_bytes: int | None = None) -> None:
        """Reserve room for an upload; repeating has no effect.

        `stored_bytes`: its tenant's bytes in a store on the same disk. Raises DiskShareExceeded for
        the tenant's own limit, StorageFull if there is no room.
        """
        with self._lock:
            if wanted.upload_id not in self._holds:
                self._check_shares(wanted, stored_bytes)
                if self._lacking(wanted) > 0:
                    raise StorageFull
                self._holds[wanted.upload_id] = wanted

    def lacking_bytes(self, wanted: Hold) -> int:
        """The bytes that must be freed for this upload to fit; 0 if it fits."""
        with self._lock:
            return 0 if wanted.upload_id in self._holds else max(0, self._lacking(wanted))

    def release(self, upload_id: str) -> None:
        """Release the upload's reservation, after its files were deleted."""
        with self._lock:
            self._holds.pop(upload_id, None)

    def restore(self, holds: Iterable[Hold]) -> None:
        """Restore the reservations of accepted uploads, whether or not there is room."""
        with self._lock:
            self._holds.update((hold.upload_id, hold) for hold in holds)

    def lacking_to_write(self, num_bytes: int) -> int:
        """The bytes that must be freed before `writing` this much; 0 if it fits."""
        with self._lock:
            return max(0, num_bytes - self._unpromised())

    def lacking_to_receive(self, num_bytes: int) -> int:
        """The bytes that must be freed before receiving this much of a reserved upload; 0 if it
        fits."""
        return max(0, num_bytes - self._free_bytes())

    @contextmanager
    def writing(self, num_bytes: int) -> Iterator[int]:
        """Reserve room for other data; yields its size. Raises StorageFull."""
        with self._lock:
            room = self._unpromised()
            if num_bytes > room:
                raise StorageFull
            self._written_now += num_bytes
        try:
            yield room
        finally:
            with self._lock:
                self._written_now -= num_bytes

    # --- inside, under the lock -------------------------------------------------------------------

    def _check_shares(self, wanted: Hold, stored_bytes: int | None) -> None:
        """Raise DiskShareExceeded."""
        own = sum(h.num_bytes for h in self._holds.values() if h.tenant_id == wanted.tenant_id)
        if own + wanted.num_bytes > self.tenant_bytes:
            raise DiskShareExceeded(
                "unfinished uploads", limit=self.tenant_bytes, used=own, wanted=wanted.num_bytes
            )
        if stored_bytes is None:
            return
        used = stored_bytes + own
        limit = (used + max(0, self._unpromised())) * STORE_SHARE // (STORE_SHARE + 1)
        if used + wanted.num_bytes > limit:
            raise DiskShareExceeded(
                "adapters and uploads", limit=limit, used=used, wanted=wanted.num_bytes
            )

    def _lacking(self, wanted: Hold) -> int:
        own = all_held = 0
        for hold in self._holds.values():
            all_held += hold.num_bytes
            own += hold.num_bytes if hold.tenant_id == wanted.tenant_id else 0
        left = self.total_bytes - all_held - wanted.num_bytes
        beyond_budget = own + wanted.num_bytes - left
        written = self._written_bytes(wanted.upload_id)
        copies = (1 + EXAMINATION_COPIES) * wanted.num_bytes - written
        return max(beyond_budget, copies - self._unpromised())

    def _unpromised(self) -> int:
        """The free bytes that are not reserved."""
        missing = sum(
            max(0, hold.num_bytes - self._written_bytes(hold.upload_id))
            for hold in self._holds.values()
        )
        return self._free_bytes() - missing - self._written_now
