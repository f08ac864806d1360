"""Writes, reads and erases encrypted prefixes on disk, in a thread of its own. Torch-free.

Reads go first, because requests wait for them. Erasures go after the writes that were begun before.
After an error of the disk nothing is written or read any more: requests compute.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...adapters.disk_room import DiskRoom
from ...adapters.identity import AdapterKey
from ...adapters.loaders import UNPACED, Pace, Paced
from .disk_tier import Done, Erased, Restored, WasRead, Written
from .key_files import FOLDER, erase_keys_of, key_name, open_folder
from .prefix_cache import Prefix
from .prefix_file import PrefixFile, file_bytes_per_slot, name_hash
from .prefix_keys import MAX_NAME_LENGTH, PrefixKeys

MAX_QUEUED_BYTES = 64 << 20
"""Of blocks that wait to be written. What is published meanwhile waits in its own tier."""
RETRY_SECONDS = 1.0
"""After an erasure that failed."""

_log = logging.getLogger(__name__)


class GroupFile(NamedTuple):
    """What the file of one KV group has room for."""

    num_slots: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class _Write:
    group: int
    slot: int
    prefix: Prefix
    content: Callable[[], memoryview]


@dataclass(frozen=True, slots=True)
class _Read:
    group: int
    slot: int
    prefix: Prefix
    host_slot: int
    put: Callable[[int, bytes], None]


class DiskStore:
    """The files of one engine in a folder that no other process uses."""

    def __init__(
        self,
        tier: Path,
        groups: Sequence[GroupFile],
        *,
        tier_key: bytes,
        identity: str,
        pace: Pace = UNPACED,
    ) -> None:
        """Open the files, and remove those of engines with another identity. If the disk fails, the
        store is off.

        `identity`: of everything that decides over the content and form of a block.
        """
        self.error: OSError | None = None
        """Why the store is off."""
        self._tier = tier.absolute()  # the program may change its working directory
        self._pace = pace
        self._block_bytes = [group.block_bytes for group in groups]
        self._files: list[PrefixFile] = []
        self._restored: list[Restored] = []
        self._reads: deque[_Read] = deque()
        self._others: deque[_Write | AdapterKey] = deque()
        """Writes, and the adapters to erase."""
        self._num_queued_bytes = 0
        self._done: list[Done] = []
        self._is_closed = False
        self._changed = threading.Condition()
        try:
            self._open(identity, groups, tier_key)
        except OSError as exc:
            self._turn_off(exc)
        self._thread = threading.Thread(target=self._work, name="prefix-disk", daemon=True)
        self._thread.start()

    @property
    def is_off(self) -> bool:
        return self.error is not None

    @property
    def num_free(self) -> int:
        if self.is_off:
            return 0
        return max(0, MAX_QUEUED_BYTES - self._num_queued_bytes) // max(self._block_bytes)

    def take_restored(self) -> Sequence[Restored]:
        restored, self._restored = self._restored, []
        return restored

    def take_done(self) -> Sequence[Done]:
        if not self._done:
            return ()
        with self._changed:
            done, self._done = self._done, []
        return done

    def write(
        self, group: int, slot: int, prefix: Prefix, content: Callable[[], memoryview]
    ) -> None:
        """Begin to write a block. `content` is called in the store's thread."""
        self._begin(self._others, _Write(group, slot, prefix, content))

    def read(
        self,
        group: int,
        slot: int,
        prefix: Prefix,
        host_slot: int,
        put: Callable[[int, bytes], None],
    ) -> None:
        """Begin to read a block. `put` is called in the store's thread, with the offset and the
        bytes of each piece."""
        self._begin(self._reads, _Read(group, slot, prefix, host_slot, put))

    def erase(self, adapter: AdapterKey) -> None:
        """Begin to make an adapter's prefixes unreadable."""
        self._begin(self._others, adapter)

    def close(self) -> None:
        """Stop after the work that is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        for file in self._files:
            file.close()

    # --- opening ----------------------------------------------------------------------------------

    def _open(self, identity: str, groups: Sequence[GroupFile], tier_key: bytes) -> None:
        folder = open_folder(self._tier, identity)
        self._keys = PrefixKeys(folder / FOLDER, tier_key)
        self._check_room(folder, groups)
        for index, group in enumerate(groups):
            file = PrefixFile(
                folder / f"group-{index}.blocks",
                num_slots=group.num_slots,
                block_bytes=group.block_bytes,
                identity=f"{identity}/{index}/".encode(),
            )
            self._files.append(file)
        self._restored = self._restore()

    def _check_room(self, folder: Path, groups: Sequence[GroupFile]) -> None:
        """Leave the reserve of the database, which may be on the same disk. Raises OSError."""
        wanted = sum(size.num_slots * file_bytes_per_slot(size.block_bytes) for size in groups)
        present = sum(path.stat().st_blocks * 512 for path in folder.glob("*.blocks"))
        if wanted - present > DiskRoom(folder).free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    def _restore(self) -> list[Restored]:
        """What an earlier process has written, the oldest first. Keys without a prefix go."""
        keys = {name: key for name in self._keys.names() if (key := self._keys.load(name))}
        by_hash = {name_hash(name): key for name, key in keys.items()}
        found = [
            (header.written_at, Restored(group, slot, header.prefix))
            for group, file in enumerate(self._files)
            for slot, header in file.headers(by_hash)
        ]
        used = {key_name(restored.prefix.namespace) for _, restored in found}
        self._keys.remove(name for name in list(self._keys.names()) if name not in used)
        found.sort(key=lambda entry: entry[0])
        return [restored for _, restored in found]

    # --- the thread -------------------------------------------------------------------------------

    def _begin(self, queue: deque[_Read] | deque[_Write | AdapterKey], job: object) -> None:
        with self._changed:
            queue.append(job)  # type: ignore[arg-type]
            if isinstance(job, _Write):
                self._num_queued_bytes += self._block_bytes[job.group]
            self._changed.notify()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            done = self._do(job)
            with self._changed:
                self._done.append(done)
                if isinstance(job, _Write):
                    self._num_queued_bytes -= self._block_bytes[job.group]
                if isinstance(done, Erased) and not done.is_right:
                    self._changed.wait(RETRY_SECONDS)

    def _next(self) -> _Read | _Write | AdapterKey | None:
        """None: the store is closed."""
        with self._changed:
            while not (self._is_closed or self._reads or self._others):
                self._changed.wait()
            if self._is_closed:
                return None
            return self._reads.popleft() if self._reads else self._others.popleft()

    def _do(self, job: _Read | _Write | AdapterKey) -> Done:
        match job:
            case _Read():
                start = time.perf_counter()
                is_right = self._try(lambda: self._read(job))
                seconds = time.perf_counter() - start
                num_bytes = self._block_bytes[job.group]
                return WasRead(job.group, job.host_slot, is_right, num_bytes, seconds)
            case _Write():
                return Written(job.group, job.slot, self._try(lambda: self._write(job)))
            case AdapterKey():
                return Erased(job, self._erase(job))

    def _try(self, work: Callable[[], bool]) -> bool:
        if self.is_off:
            return False
        try:
            return work()
        except OSError as exc:
            self._turn_off(exc)
            return False

    def _read(self, job: _Read) -> bool:
        key = self._keys.load(key_name(job.prefix.namespace))
        if key is None:
            return False
        return self._files[job.group].read(job.slot, job.prefix, job.put, key=key)

    def _write(self, job: _Write) -> bool:
        name = key_name(job.prefix.namespace)
        if len(name) > MAX_NAME_LENGTH:
            return False
        return self._files[job.group].write(
            job.slot,
            job.prefix,
            job.content(),
            key_name=name,
            key=self._keys.load_or_create(name),
            written_at=time.time_ns(),
            pause=Paced(self._pace).pause,
        )

    def _erase(self, adapter: AdapterKey) -> bool:
        try:
            erase_keys_of(self._tier, adapter)
        except OSError as exc:
            _log.error("prefixes_not_erased_on_disk", extra={"error": str(exc)})
            return False
        return True

    def _turn_off(self, exc: OSError) -> None:
        self.error = exc
        _log.error("prefix_disk_off", extra={"error": str(exc)})
