"""Disk cache of adapter blocks from the object store: bounded and crash-safe.

File names are hashes of the adapter key, never a tenant's text. A file gets its name only after its
bytes are on disk. Files left by an earlier run are verified before their first use.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .durable import sync_directory
from .errors import ObjectNotFound
from .identity import AdapterKey
from .wiping import file_digest

MIN_STAY_SECONDS = 60.0
RECENT_SECONDS = 600.0
"""A block used within this time counts for its tenant; the others go first."""
_SUFFIX = ".block"
_PARTIAL_SUFFIX = ".partial"
_TENANT_DIGITS = 16


class DiskCacheStats(NamedTuple):
    """Counters since the start, and current sizes."""

    used_bytes: int = 0
    capacity_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_corrupt: int = 0
    """Files that no longer had the content they were stored with."""


class CachedFile(NamedTuple):
    """A block file in the cache's directory."""

    size_bytes: int
    used_at: float
    """The time of the last use, in seconds since 1970."""


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    used_at: float
    """The time of the last use, on the cache's clock; infinity during the download."""
    is_verified: bool
    """Whether this process has seen its whole content."""
    is_awaited: bool
    """Whether it is being downloaded, or was handed out and not read since."""


class DiskCache:
    """Blocks by adapter key, at most `capacity_bytes` of them.

    Room is made in the order of last use: first blocks that were not used for ten minutes, then
    blocks of tenants above an equal share. One process owns a directory. Methods are thread-safe;
    for one key the caller allows one `get` or `add` at a time (the fetcher's single flight).

    A path that was handed out is kept until it was read, for at most a minute. Until then the cache
    may exceed its capacity by these files.
    """

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        min_stay_seconds: float = MIN_STAY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        free_bytes: Callable[[Path], int] = lambda directory: shutil.disk_usage(directory).free,
    ) -> None:
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._min_stay_seconds = min_stay_seconds
        self._clock = clock
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        _claim_directory(directory)
        self._entries = self._adopt_files()

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries, those being downloaded included."""
        with self._lock:
            return self._used_bytes()

    @property
    def stats(self) -> DiskCacheStats:
        with self._lock:
            return DiskCacheStats(
                used_bytes=self._used_bytes(),
                capacity_bytes=self._capacity_bytes,
                num_hits=self._counts["hits"],
                num_misses=self._counts["misses"],
                num_evictions=self._counts["evictions"],
                num_corrupt=self._counts["corrupt"],
            )

    def get(self, key: AdapterKey, *, sha256: str, size_bytes: int) -> Path | None:
        """The block's path if it is here and has this size and hex SHA-256, else None."""
        path = self._find(key, sha256=sha256, size_bytes=size_bytes)
        with self._lock:
            self._counts["misses" if path is None else "hits"] += 1
        return path

    def add(self, key: AdapterKey, size_bytes: int, download: Callable[[Path], None]) -> Path:
        """Make room, let `download` write the verified block to a path, and keep it.

        Whatever `download` raises is passed on, and nothing is kept. Raises ObjectNotFound if the
        key was removed meanwhile, and OSError (ENOSPC) without a download if the disk is too full.
        """
        path = self._path(key)
        partial = path.with_suffix(_PARTIAL_SUFFIX)
        with self._lock:
            self._make_room(_tenant(path.name), size_bytes)
            self._entries[path.name] = _Entry(
                size_bytes, float("inf"), is_verified=True, is_awaited=True
            )
        try:
            download(partial)
            self._publish(partial, path)
        except BaseException:
            self.remove(key)
            raise
        return path

    def note_read(self, key: AdapterKey) -> None:
        """The receiver of the path no longer needs the file."""
        with self._lock:
            entry = self._entries.get(self._path(key).name)
            if entry is not None and entry.used_at != float("inf"):
                entry.is_awaited = False

    def remove(self, key: AdapterKey) -> None:
        """Forget a block, whether it is here or not."""
        path = self._path(key)
        with self._lock:
            self._entries.pop(path.name, None)
            path.unlink(missing_ok=True)
            path.with_suffix(_PARTIAL_SUFFIX).unlink(missing_ok=True)

    def trim(self, num_bytes: int, *, keep_bytes: int) -> int:
        """Evict this many bytes, least recently used first, but keep `keep_bytes`; returns the
        evicted bytes.

        Files that are about to be read are kept.
        """
        freed_bytes = 0
        with self._lock:
            spare_bytes = self._used_bytes() - keep_bytes
            for name in self._unused():
                size_bytes = self._entries[name].size_bytes
                if freed_bytes >= num_bytes or freed_bytes + size_bytes > spare_bytes:
                    break
                self._evict(name)
                freed_bytes += size_bytes
        return freed_bytes

    def _path(self, key: AdapterKey) -> Path:
        return self._directory / file_name(key)

    def _find(self, key: AdapterKey, *, sha256: str, size_bytes: int) -> Path | None:
        path = self._path(key)
        with self._lock:
            entry = self._entries.get(path.name)
            if entry is None:
                return None
            self._touch(path.name)
        try:
            if entry.is_verified or _has_content(path, sha256=sha256, size_bytes=size_bytes):
                entry.is_verified = True
                os.utime(path)  # the order of use outlives this process
                return path
        except FileNotFoundError:
            pass  # someone cleared the directory
        else:
            with self._lock:
                self._counts["corrupt"] += 1
        self.remove(key)
        return None

    def _publish(self, partial: Path, path: Path) -> None:
        """Give a finished download its name."""
        with self._lock:
            if path.name not in self._entries:
                raise ObjectNotFound("the adapter was deleted while it was fetched")
            partial.replace(path)
            self._touch(path.name)
        sync_directory(self._directory)

    def _touch(self, name: str) -> None:
        if entry := self._entries.get(name):
            entry.used_at = self._clock()
            entry.is_awaited = True
            self._entries.move_to_end(name)

    def _used_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self._entries.values())

    def _make_room(self, tenant: str, size_bytes: int) -> None:
        """Evict for a newcomer of `tenant`. Raises OSError if the disk cannot take it."""
        used_bytes = self._used_bytes()
        under_way = sum(e.size_bytes for e in self._entries.values() if e.used_at == float("inf"))
        disk_bytes = used_bytes - under_way + self._free_bytes(self._directory)
        limit_bytes = min(self._capacity_bytes, disk_bytes)
        for name in self._victims(tenant, size_bytes, limit_bytes):
            if used_bytes + size_bytes <= limit_bytes:
                return
            used_bytes -= self._entries[name].size_bytes
            self._evict(name)
        if used_bytes + size_bytes > disk_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _evict(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)
        del self._entries[name]
        self._counts["evictions"] += 1

    def _unused(self) -> list[str]:
        """Files that are not about to be read, least recently used first."""
        now = self._clock()
        return [name for name, entry in self._entries.items() if self._may_go(entry, now)]

    def _may_go(self, entry: _Entry, now: float) -> bool:
        return not entry.is_awaited or entry.used_at <= now - self._min_stay_seconds

    def _victims(self, tenant: str, size_bytes: int, limit_bytes: int) -> Iterator[str]:
        """The files that may be evicted for a new one, in this order, without those that are about
        to be read."""
        now = self._clock()
        idle, in_use = [], []
        held: Counter[str] = Counter({tenant: size_bytes})
        for name, entry in self._entries.items():
            if entry.used_at <= now - max(RECENT_SECONDS, self._min_stay_seconds):
                idle.append(name)
                continue
            held[_tenant(name)] += entry.size_bytes
            if self._may_go(entry, now):
                in_use.append(name)
        yield from idle
        fair_bytes = limit_bytes // len(held)
        for name in in_use:
            if held[_tenant(name)] > fair_bytes:
                held[_tenant(name)] -= self._entries[name].size_bytes
                yield name

    def _adopt_files(self) -> OrderedDict[str, _Entry]:
        """Entries for files of an earlier run, oldest first; partial downloads are deleted."""
        files = []
        for path in self._directory.iterdir():
            if path.suffix == _SUFFIX:
                files.append((path, path.stat()))
            elif path.suffix == _PARTIAL_SUFFIX:
                path.unlink()
        files.sort(key=lambda file: file[1].st_mtime)
        return OrderedDict(
            (path.name, _Entry(status.st_size, float("-inf"), is_verified=False, is_awaited=False))
            for path, status in files
        )


def file_name(key: AdapterKey) -> str:
    """The name of a block's file.

    After a restart, its tenant part shows whose share the file counts for.
    """
    tenant = hashlib.sha256(key.tenant_id.encode()).hexdigest()[:_TENANT_DIGITS]
    content = hashlib.sha256(f"{key.tenant_id}\0{key.digest}".encode()).hexdigest()
    return f"{tenant}-{content}{_SUFFIX}"


def list_cached_files(directory: Path) -> dict[str, CachedFile]:
    """The blocks in a cache's directory, least recently used first, for a process that does not own
    it."""
    found = {}
    for path in directory.glob(f"*{_SUFFIX}"):
        try:
            status = path.stat()
        except OSError:  # it was removed meanwhile
            continue
        found[path.name] = CachedFile(status.st_size, status.st_mtime)
    return dict(sorted(found.items(), key=lambda entry: entry[1].used_at))


def _tenant(name: str) -> str:
    """The tenant part of a file name."""
    return name[:_TENANT_DIGITS]


def _claim_directory(directory: Path) -> None:
    """Create the directory or check that only this user can access it. Raises PermissionError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid():
        raise PermissionError(f"the adapter cache {directory} belongs to another user")
    directory.chmod(0o700)


def _has_content(path: Path, *, sha256: str, size_bytes: int) -> bool:
    if path.stat().st_size != size_bytes:
        return False
    return bool(file_digest(path).hexdigest() == sha256)
