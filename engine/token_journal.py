"""The token journal: the cost of every request so far, in a file that survives its process.

The file has fixed slots, one per sequence. The API server allocates a slot before it submits the
sequence to an engine, updates the counts when it receives the engine's events, and frees the slot
once the cost is in the database. It maps the file, so counting makes no system call, and the counts
remain if the server is killed. Each number is one aligned word that is written at once, so a killed
process leaves the old or the new one. (`struct.pack_into` would write zeros first.)

Every slot stores its owner, in bytes that the journal does not interpret; the slots of one request
have the same owner. Its first slot, the *head*, stores the outcome once the charge is decided.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..adapters.durable import take_room

SLOT_BYTES = 512
NUM_SLOTS = 32768
MAX_OWNER_BYTES = 304
MAX_OUTCOME_BYTES = 144

_FREE, _OPEN, _CLOSED = range(3)

_STATE, _POSITION, _COUNTS_PROMPT = 0, 8, 16
_PROMPT, _CACHED, _GENERATED = 24, 32, 40
_OWNER_LENGTH, _OUTCOME_LENGTH = 48, 56
_OWNER = 64
_OUTCOME = _OWNER + MAX_OWNER_BYTES
_WORD_BYTES = 8


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


class SlotCounter:
    """Counts the tokens of one sequence in its slot."""

    def __init__(self, words: memoryview, slot: int) -> None:
        """`words`: of the journal's file."""
        self._words = words
        self._prompt, self._cached = _word(slot, _PROMPT), _word(slot, _CACHED)
        self._generated = _word(slot, _GENERATED)

    def start(self, *, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The engine has scheduled the sequence."""
        # The prompt last: without it the sequence has not started.
        self._words[self._cached] = num_cached_tokens
        self._words[self._prompt] = num_prompt_tokens

    def generate(self, num_tokens: int) -> None:
        """The sequence has this many output tokens in total."""
        self._words[self._generated] = num_tokens


class TokenJournal:
    """Gives slots out, reads them and frees them. Only one process may have the file open."""

    def __init__(self, path: Path, *, num_slots: int = NUM_SLOTS) -> None:
        """Open the file, created on first use.

        It has at least `num_slots` slots. Disk space for all of them is allocated now, because a
        mapped file cannot report a full disk. Raises OSError if the file cannot be opened.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            num_bytes = max(num_slots * SLOT_BYTES, os.fstat(self._descriptor).st_size)
            take_room(self._descriptor, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_slots = num_bytes // SLOT_BYTES
        self._words = memoryview(self._map)[: self.num_slots * SLOT_BYTES].cast("Q")
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
            for offset in (_PROMPT, _CACHED, _GENERATED):
                self._put(slot, offset, 0)
            self._put(slot, _POSITION, position)
            self._put(slot, _COUNTS_PROMPT, counts_prompt[position])
            self._put_bytes(slot, _OWNER, _OWNER_LENGTH, owner)
        for slot in reversed(slots):  # the head last: it makes the request exist
            self._put(slot, _STATE, _OPEN)
        return slots

    def counter(self, slot: int) -> SlotCounter:
        """A counter of this open slot, to use until the slot is freed."""
        return SlotCounter(self._words, slot)

    def counts(self, slots: Iterable[int]) -> Counts:
        """What was counted for these sequences."""
        prompt = cached = generated = 0
        for slot in slots:
            generated += self._get(slot, _GENERATED)
            if self._get(slot, _COUNTS_PROMPT):
                prompt += self._get(slot, _PROMPT)
                cached += self._get(slot, _CACHED) if self._get(slot, _PROMPT) else 0
        return Counts(prompt, cached, generated)

    def close_request(self, slots: Sequence[int], outcome: bytes) -> None:
        """Decide what the request is charged: from now on the counts are ignored.

        It is decided once: a process killed while it rewrites an outcome would leave a mixture.
        """
        assert self._get(slots[0], _STATE) == _OPEN, "the outcome is not decided yet"
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
        """Forget the request, which nobody counts any more. Its slots are used again last."""
        # The head first: without it the request is not there.
        for slot in slots:
            self._put(slot, _STATE, _FREE)
        self._free.extend(slots)

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
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
        value: int = self._words[_word(slot, offset)]
        return value

    def _put(self, slot: int, offset: int, value: int) -> None:
        self._words[_word(slot, offset)] = value

    def _bytes(self, slot: int, offset: int, length_offset: int) -> bytes:
        start = slot * SLOT_BYTES + offset
        return self._map[start : start + self._get(slot, length_offset)]

    def _put_bytes(self, slot: int, offset: int, length_offset: int, content: bytes) -> None:
        start = slot * SLOT_BYTES + offset
        self._map[start : start + len(content)] = content
        self._put(slot, length_offset, len(content))


def _word(slot: int, offset: int) -> int:
    """The place of a slot's number among the words of the file."""
    return (slot * SLOT_BYTES + offset) // _WORD_BYTES
