"""Caches compiled grammars per tenant, so that no tenant can observe another's grammars."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from .spec import GrammarSpec

EntryT = TypeVar("EntryT")

BASE_BYTES = 1 << 20
BYTES_PER_CHARACTER = 256
"""The measured maximum of a compiled grammar, for typical grammars."""


class GrammarKey(NamedTuple):
    tenant_id: str
    spec: GrammarSpec

    @property
    def num_bytes(self) -> int:
        """The estimated size after compilation."""
        return BASE_BYTES + BYTES_PER_CHARACTER * len(self.spec.text)


class GrammarCache(Generic[EntryT]):
    """Evicts the least recently used entries. An entry is a future of the compiled grammar, so
    requests that arrive during compilation share it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[GrammarKey, EntryT] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: GrammarKey) -> EntryT | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: GrammarKey, entry: EntryT) -> None:
        """Requests that wait for or use an evicted entry keep it."""
        self.drop(key)
        self._entries[key] = entry
        self._num_bytes += key.num_bytes
        while self._num_bytes > self._capacity_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: GrammarKey) -> None:
        if self._entries.pop(key, None) is not None:
            self._num_bytes -= key.num_bytes
