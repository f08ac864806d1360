"""What a pool evicted last: what it would still hold if it had a little more memory.

Torch-free. A pool that evicts the least recently used first and has `depth` more bytes would have
kept the last `depth` bytes that it evicted. So a use of one of these is a use that so much more
memory would have served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Ghosts(Generic[K]):
    """The keys of the last `depth` evicted bytes, or other units of the owner's choice."""

    def __init__(self, depth: int = 0) -> None:
        """0: none is remembered."""
        self.depth = depth
        self._sizes: OrderedDict[K, int] = OrderedDict()
        self._total = 0

    def __contains__(self, key: K) -> bool:
        return key in self._sizes

    def add(self, key: K, size: int) -> None:
        """Note an eviction."""
        self.take(key)
        self._sizes[key] = size
        self._total += size
        while self._total > self.depth:
            _, oldest = self._sizes.popitem(last=False)
            self._total -= oldest

    def take(self, key: K) -> bool:
        """Forget a key, which is used again or deleted; True if it was remembered."""
        size = self._sizes.pop(key, None)
        self._total -= size or 0
        return size is not None
