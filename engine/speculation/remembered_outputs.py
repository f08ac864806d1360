"""The recent outputs of adapter versions, from which later requests of the same are drafted.

Torch-free. The outputs of a version are kept in parts, each an `OutputIndex`: what is too old, or
too much, is dropped as a whole part, the oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from .output_index import OutputIndex

MAX_AGE_SECONDS = 3600.0
"""No output is kept for longer after its request has ended."""
MAX_TOKENS = 1 << 18
"""Of all versions: some 32 MiB."""
MAX_PARTS = 4
"""Of one version."""
PART_TOKENS = 4096
"""At which a part is full. The last tokens of a longer output are kept."""
PART_SECONDS = MAX_AGE_SECONDS / MAX_PARTS
"""After which nothing is added to a part."""
SETTLING_SECONDS = 5.0
"""After outputs were to be forgotten: for so long, requests may arrive from servers that have not
learned of it. Names mean what they meant up to three seconds ago."""


class _Part(NamedTuple):
    begun_at: float
    outputs: OutputIndex

    def admits(self, num_tokens: int, now: float) -> bool:
        is_young = now - self.begun_at < PART_SECONDS
        return is_young and self.outputs.num_tokens + num_tokens <= PART_TOKENS


class RememberedOutputs:
    """By adapter version. A version belongs to one tenant."""

    def __init__(self) -> None:
        self._parts: dict[AdapterKey, list[_Part]] = {}
        """The oldest first."""
        self._forgotten_until: dict[AdapterKey, float] = {}
        """Outputs of requests that arrived earlier are not remembered."""
        self.num_tokens = 0
        """Of all versions."""

    def of(self, adapter: AdapterKey) -> Sequence[OutputIndex]:
        """The parts that remember its outputs."""
        return [part.outputs for part in self._parts.get(adapter, ())]

    def add(
        self,
        adapter: AdapterKey,
        token_ids: Sequence[int],
        start: int,
        *,
        arrived_at: float,
        now: float,
    ) -> None:
        """Remember an output: the tokens from `start` on. Those before it are context alone.

        `arrived_at`: when its request arrived, by the clock of `now`. Ignored if the version's
        outputs were to be forgotten since, or if it is too old to know.
        """
        earliest = now - MAX_AGE_SECONDS
        for part in adapter.parts:
            earliest = max(earliest, self._forgotten_until.get(part, earliest))
        start = max(start, len(token_ids) - PART_TOKENS)
        num_tokens = len(token_ids) - start
        if num_tokens and arrived_at >= earliest:
            self._open_part(adapter, num_tokens, now).outputs.add(token_ids, start)
            self.num_tokens += num_tokens
            self._make_room()

    def forget(self, adapter: AdapterKey, now: float) -> None:
        """Drop the outputs of a version and of its compositions, and remember none of requests that
        have arrived by now or arrive shortly."""
        for key in [key for key in self._parts if key.has_part(adapter)]:
            while key in self._parts:
                self._drop_oldest(key)
        self._forgotten_until[adapter] = now + SETTLING_SECONDS

    def drop_old(self, now: float) -> None:
        """Drop what is older than an hour."""
        earliest = now - MAX_AGE_SECONDS
        for key, parts in list(self._parts.items()):
            while parts and parts[0].begun_at <= earliest:
                self._drop_oldest(key)
        for key, until in list(self._forgotten_until.items()):
            if until <= earliest:
                del self._forgotten_until[key]

    def _open_part(self, adapter: AdapterKey, num_tokens: int, now: float) -> _Part:
        """The part that takes an output of so many tokens."""
        parts = self._parts.setdefault(adapter, [])
        if not parts or not parts[-1].admits(num_tokens, now):
            parts.append(_Part(now, OutputIndex()))
            if len(parts) > MAX_PARTS:
                self._drop_oldest(adapter)
        return parts[-1]

    def _make_room(self) -> None:
        while self.num_tokens > MAX_TOKENS:
            self._drop_oldest(min(self._parts, key=lambda key: self._parts[key][0].begun_at))

    def _drop_oldest(self, adapter: AdapterKey) -> None:
        parts = self._parts[adapter]
        self.num_tokens -= parts.pop(0).outputs.num_tokens
        if not parts:
            del self._parts[adapter]
