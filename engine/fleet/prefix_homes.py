"""Which replica computed the first blocks of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_PREFIXES = 100_000


class PrefixHomes:
    """The home of a prefix is the replica that had it first; the least recently used are dropped.

    The caller gives block hashes that are chained from the adapter's key, as the prefix cache's
    are, so equal hashes mean equal adapters and equal tokens from the prompt's start.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def find(self, block_hashes: Sequence[bytes]) -> str | None:
        """The home of the longest known prefix."""
        for block_hash in reversed(block_hashes):
            home = self._homes.get(block_hash)
            if home is not None:
                return home
        return None

    def record(self, block_hashes: Sequence[bytes], replica: str) -> None:
        """Gives `replica` the prefixes that have no home yet."""
        for block_hash in block_hashes:
            self._homes.setdefault(block_hash, replica)
            self._homes.move_to_end(block_hash)
        while len(self._homes) > self._max_prefixes:
            self._homes.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Drops the prefixes of a replica whose KV cache is lost, on its disk too."""
        lost = [block_hash for block_hash, home in self._homes.items() if home == replica]
        for block_hash in lost:
            del self._homes[block_hash]
