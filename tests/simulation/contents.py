"""Simulated keys and values: everything that they depend on.

The value at a position is a hash over the tenant, the adapter, the rotary context and all tokens up
to it, as a real one depends on all of them. So reading a value that belongs elsewhere is detected.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from loraplex.engine.kv.prefix_cache import CacheNamespace

VOCABULARY = 40
STOP_TOKEN = 0
ZERO = 0
NAN = -1
_MASK = (1 << 56) - 1
_NUM_OWNERS = 256


def next_token(value: int, seed: int) -> int:
    """What is drawn behind a position with this value."""
    return (value // 4096 + seed) % VOCABULARY


def owner_of(tenant_id: str) -> int:
    """What the value of a cell says about whose it is."""
    return zlib.crc32(tenant_id.encode()) % _NUM_OWNERS


def is_foreign(value: int, owner: int) -> bool:
    """Whether a cell holds something that is neither zero nor this tenant's: NaN included."""
    return value != ZERO and (value < 0 or value % _NUM_OWNERS != owner)


def values_of_block(
    namespace: CacheNamespace, before: int | None, token_ids: Sequence[int]
) -> list[int]:
    """The values of tokens that follow a position with the value `before`; None: of the first."""
    contents = Contents(namespace)
    if before is not None:
        contents.go_on_from(before)
    return contents.up_to(token_ids, len(token_ids))


class Contents:
    """The values of one request's positions, computed as its tokens become known."""

    __slots__ = ("_last", "owner", "values")

    def __init__(self, namespace: CacheNamespace) -> None:
        self.owner = owner_of(namespace.tenant_id)
        self._last = zlib.crc32(repr(namespace).encode())
        self.values: list[int] = []

    def up_to(self, token_ids: Sequence[int], length: int) -> list[int]:
        """The values of all known positions, at least the first `length`."""
        values, last = self.values, self._last
        for position in range(len(values), length):
            last = (last * 6364136223846793005 + token_ids[position] + 1442695040888963407) & _MASK
            last ^= last >> 29
            values.append(last * _NUM_OWNERS + self.owner + _NUM_OWNERS)
        self._last = last
        return values

    def behind(self, token_ids: Sequence[int]) -> list[int]:
        """The values of tokens drafted to follow all known positions; nothing is remembered."""
        drafted = Contents.__new__(Contents)
        drafted.owner, drafted._last, drafted.values = self.owner, self._last, []
        return drafted.up_to(token_ids, len(token_ids))

    def go_on_from(self, value: int) -> None:
        """Let the first position be the one after that of `value`."""
        self._last = value // _NUM_OWNERS - 1
