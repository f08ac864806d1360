"""Each adapter's order of the replicas, by rendezvous hashing.

A replica that leaves is removed from every order, and one that joins is inserted into every order.
The other replicas keep their places, so only adapters whose first replica changed move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

MAX_CACHED_ORDERS = 20_000
"""With 100 replicas about 17 MB."""


class RendezvousOrder:
    """The order is the same in every API server: it depends on names only."""

    def __init__(self, replicas: Iterable[str] = ()) -> None:
        self._replicas = set(replicas)
        self._orders: dict[str, list[str]] = {}

    def add(self, replica: str) -> None:
        if replica not in self._replicas:
            self._replicas.add(replica)
            self._orders.clear()

    def remove(self, replica: str) -> None:
        if replica in self._replicas:
            self._replicas.remove(replica)
            self._orders.clear()

    def of(self, adapter: str) -> Sequence[str]:
        """All replicas, the adapter's preferred one first."""
        order = self._orders.get(adapter)
        if order is None:
            if len(self._orders) >= MAX_CACHED_ORDERS:
                self._orders.clear()
            key = blake2b(adapter.encode(), digest_size=32).digest()
            order = sorted(self._replicas, key=lambda replica: _weight(key, replica), reverse=True)
            self._orders[adapter] = order
        return order


def _weight(key: bytes, replica: str) -> tuple[bytes, str]:
    """The replica's name breaks ties."""
    return blake2b(replica.encode(), key=key, digest_size=8).digest(), replica
