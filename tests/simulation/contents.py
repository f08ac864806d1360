"""Simulated keys and values: everything that they depend on.

The value at a position is a hash over the tenant, the rotary context, all tokens up to it, and the
adapter and its start if it acts on one of them, as a real one depends on all of these. So reading a
value that belongs elsewhere is detected.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from loraplex.engine.kv.prefix_cache import CacheNamespace

VOCABULARY = 40
STOP_TOKEN = 0
ZERO = 0
NAN = -1
_MASK = (1 << 56) - 1
_NUM_OWNERS = 256
_NEVER = -1


def next_token(value: int, seed: int) -> int:
    """What is drawn behind a position with this value."""
    return (value // 4096 + seed) % VOCABULARY


def owner_of(tenant_id: str) -> int:
    """What the value of a cell says about whose it is."""
    return zlib.crc32(tenant_id.encode()) % _NUM_OWNERS


def is_foreign(value: int, owner: int) -> bool:
    """Whether a cell holds something that is neither zero nor this tenant's: NaN included."""
    return value != ZERO and (value < 0 or value % _NUM_OWNERS != owner)


class End(NamedTuple):
    """Where a block ends."""

    position: int
    value: int
    """Of the last position."""


def values_of_block(
    namespace: CacheNamespace, before: End | None, token_ids: Sequence[int]
) -> list[int]:
    """The values of tokens that follow a block; None: of the first."""
    contents = Contents(namespace)
    if before is not None:
        contents.go_on_from(before)
    return contents.up_to(token_ids, len(token_ids))


class Contents:
    """The values of one request's positions, computed as its tokens become known."""

    __slots__ = ("_acting", "_last", "_start", "owner", "values")

    def __init__(self, namespace: CacheNamespace) -> None:
        self.owner = owner_of(namespace.tenant_id)
        self._last = zlib.crc32(repr(namespace.of_block(0)).encode())
        self._acting = zlib.crc32(repr(namespace).encode())
        self._start = namespace.adapter_start if namespace.adapter else _NEVER
        """The index in `values` of the first position that the adapter acts on."""
        self.values: list[int] = []

    def up_to(self, token_ids: Sequence[int], length: int) -> list[int]:
        """The values of all known positions, at least the first `length`."""
        values, last = self.values, self._last
        for position in range(len(values), length):
            if position == self._start:
                last ^= self._acting
            last = (last * 6364136223846793005 + token_ids[position] + 1442695040888963407) & _MASK
            last ^= last >> 29
            values.append(last * _NUM_OWNERS + self.owner + _NUM_OWNERS)
        self._last = last
        return values

    def behind(self, token_ids: Sequence[int]) -> list[int]:
        """The values of tokens drafted to follow all known positions; nothing is remembered."""
        drafted = Contents.__new__(Contents)
        drafted.owner, drafted._last, drafted.values = self.owner, self._last, []
        drafted._acting, drafted._start = self._acting, _NEVER
        return drafted.up_to(token_ids, len(token_ids))

    def go_on_from(self, end: End) -> None:
        """Let the first position be the one at which a block ended."""
        self._last = end.value // _NUM_OWNERS - 1
        self._start -= end.position
