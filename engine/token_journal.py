"""The token journal: the cost of every request so far, in a file that survives both processes.

The file has fixed slots, one per sequence. The parent allocates a slot before it submits the
sequence to the engine. The engine updates the counts before anybody sees a token. The parent frees
the slot once the cost is in the database. Both map the file, so counting makes no system call, and
the counts remain if either process, or both, are killed. Each number is one aligned word with one
writer, so it is never half written.

Every slot stores its owner, in bytes that only the parent interprets; the slots of one request have
the same owner. Its first slot, the *head*, stores the outcome when the parent has decided what to
charge.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..adapters.durable import take_room

SLOT_BYTES = 512
NUM_SLOTS = 32768
MAX_OWNER_BYTES = 304
MAX_OUTCOME_BYTES = 144
WRITER_SECONDS = 10.0
"""How long an engine may outlive its parent."""
_POLL_SECONDS = 0.01
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""Linux: map all pages at once. Otherwise they would cause page faults during steps, and look like
a memory leak for hours, because slots are used round-robin."""

_FREE, _OPEN, _CLOSED = range(3)

# The parent's words, the engine's, the parent's again.
_STATE, _POSITION, _COUNTS_PROMPT = 0, 8, 16
_PROMPT, _CACHED, _GENERATED = 24, 32, 40
_OWNER_LENGTH, _OUTCOME_LENGTH = 48, 56
_OWNER = 64
_OUTCOME = _OWNER + MAX_OWNER_BYTES
_WORD = struct.Struct("@Q")


class JournalFull(Exception):
    """No slot is free."""


class Counts(NamedTuple):
    """Tokens of one request, over its sequences."""

    prompt: int = 0
    """The prompt tokens of the sequences that account for their prompt, if they have started."""
    cached: int = 0
    """The part of `prompt` found in the prefix cache."""
    generated: int = 0


class Entry(NamedTuple):
    """One request left by an earlier process."""

    slots: tuple[int, ...]
    """The head first."""
    owner: bytes
    outcome: bytes | None
    """None: undecided, so the counts apply."""


class JournalCounters:
    """The engine's side: it counts."""

    def __init__(self, path: Path) -> None:
        """Map the parent's file; its lock shows that a writer is alive."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        self._map = mmap.mmap(self._descriptor, 0, flags=mmap.MAP_SHARED | _POPULATE)

    def start(self, slot: int, *, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The sequence is computed from now on."""
        _WORD.pack_into(self._map, slot * SLOT_BYTES + _CACHED, num_cached_tokens)
        _WORD.pack_into(self._map, slot * SLOT_BYTES + _PROMPT, num_prompt_tokens)

    def generate(self, slot: int, num_tokens: int) -> None:
        """The sequence has this many output tokens in total."""
        _WORD.pack_into(self._map, slot * SLOT_BYTES + _GENERATED, num_tokens)

    def close(self) -> None:
        """Count no more."""
        self._map.close()
        os.close(self._descriptor)


class TokenJournal:
    """The parent's side: it gives slots out, reads them and frees them."""

    def __init__(self, path: Path, *, num_slots: int = NUM_SLOTS) -> None:
        """Open the file, created on first use, once no writer is left.

        It has at least `num_slots` slots. Disk space for all of them is allocated now, because a
        mapped file cannot report a full disk. Raises TimeoutError if an engine still writes after
        WRITER_SECONDS, OSError if the file cannot be opened.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _wait_for_writers(self._descriptor)
            num_bytes = max(num_slots * SLOT_BYTES, os.fstat(self._descriptor).st_size)
            take_room(self._descriptor, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_slots = num_bytes // SLOT_BYTES
        self._left = list(self._read_entries())
        used = {slot for entry in self._left for slot in entry.slots}
        self._free: deque[int] = deque()
        for slot in range(self.num_slots):
            if slot not in used:
                self._put(slot, _STATE, _FREE)  # of a request that never started, or had ended
                self._free.append(slot)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_left(self) -> list[Entry]:
        """The entries of earlier processes, once; their slots are in use until they are freed."""
        left, self._left = self._left, []
        return left

    def open(self, owner: bytes, counts_prompt: Sequence[bool]) -> tuple[int, ...]:
        """Allocate slots for a request, one per sequence; `counts_prompt`: which of them charge the
        prompt.

        Raises JournalFull.
        """
        if len(owner) > MAX_OWNER_BYTES:
            raise ValueError("the owner is too long for a slot")
        if len(counts_prompt) > len(self._free):
            raise JournalFull
        slots = tuple(self._free.popleft() for _ in counts_prompt)
        for position, slot in enumerate(slots):
            self.reset(slot)
            self._put(slot, _POSITION, position)
            self._put(slot, _COUNTS_PROMPT, counts_prompt[position])
            self._put_bytes(slot, _OWNER, _OWNER_LENGTH, owner)
        for slot in reversed(slots):  # the head last: it makes the request exist
            self._put(slot, _STATE, _OPEN)
        return slots

    def reset(self, slot: int) -> None:
        """Reset the counts of this sequence, which no engine has."""
        for offset in (_PROMPT, _CACHED, _GENERATED):
            self._put(slot, offset, 0)

    def counts(self, slots: Iterable[int]) -> Counts:
        """The engine's counts for these sequences."""
        prompt = cached = generated = 0
        for slot in slots:
            generated += self._get(slot, _GENERATED)
            if self._get(slot, _COUNTS_PROMPT):
                prompt += self._get(slot, _PROMPT)
                cached += self._get(slot, _CACHED) if self._get(slot, _PROMPT) else 0
        return Counts(prompt, cached, generated)

    def close_request(self, slots: Sequence[int], outcome: bytes) -> None:
        """Decide what the request is charged: from now on the counts are ignored."""
        if len(outcome) > MAX_OUTCOME_BYTES:
            raise ValueError("the outcome is too long for a slot")
        self._put_bytes(slots[0], _OUTCOME, _OUTCOME_LENGTH, outcome)
        self._put(slots[0], _STATE, _CLOSED)

    def sync(self, slots: Sequence[int]) -> None:
        """Return once the request's head is on the disk. Waits for it: not for an event loop."""
        start = slots[0] * SLOT_BYTES
        page = start - start % mmap.PAGESIZE
        self._map.flush(page, start + SLOT_BYTES - page)

    def free(self, slots: Sequence[int]) -> None:
        """Forget the request; no engine may have it any more. Its slots are used again last."""
        # The head first: without it the request is not there.
        for slot in slots:
            self._put(slot, _STATE, _FREE)
        self._free.extend(slots)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
        os.close(self._descriptor)

    def _read_entries(self) -> Iterator[Entry]:
        slots_by_owner: dict[bytes, list[int]] = {}
        for slot in range(self.num_slots):
            if self._get(slot, _STATE) != _FREE:
                owner = self._bytes(slot, _OWNER, _OWNER_LENGTH)
                slots_by_owner.setdefault(owner, []).append(slot)
        for owner, slots in slots_by_owner.items():
            slots.sort(key=lambda slot: self._get(slot, _POSITION))
            head = slots[0]
            if self._get(head, _POSITION) == 0:
                is_closed = self._get(head, _STATE) == _CLOSED
                outcome = self._bytes(head, _OUTCOME, _OUTCOME_LENGTH) if is_closed else None
                yield Entry(tuple(slots), owner, outcome)

    def _get(self, slot: int, offset: int) -> int:
        value: int = _WORD.unpack_from(self._map, slot * SLOT_BYTES + offset)[0]
        return value

    def _put(self, slot: int, offset: int, value: int) -> None:
        _WORD.pack_into(self._map, slot * SLOT_BYTES + offset, value)

    def _bytes(self, slot: int, offset: int, length_offset: int) -> bytes:
        start = slot * SLOT_BYTES + offset
        return self._map[start : start + self._get(slot, length_offset)]

    def _put_bytes(self, slot: int, offset: int, length_offset: int, content: bytes) -> None:
        start = slot * SLOT_BYTES + offset
        self._map[start : start + len(content)] = content
        self._put(slot, length_offset, len(content))


def _wait_for_writers(descriptor: int) -> None:
    """Return once no engine of an earlier parent counts any more. Raises TimeoutError."""
    deadline = time.monotonic() + WRITER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("an engine of an earlier server still runs") from None
        time.sleep(_POLL_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
