"""Waiting requests whose prefixes are being read from the disk. Torch-free.

A request waits for its prefix beside the others, and only as long as computing it would take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..kv.blocks import KvBlocks
from ..kv.disk_tier import Place
from ..request import Request
from .swap_costs import SwapCosts

PATIENCE_SECONDS = 1.0
"""The longest wait while nothing is known about computing."""


class _Wait(NamedTuple):
    places: list[Place]
    num_tokens: int
    until: float


class DiskReads:
    def __init__(self, kv: KvBlocks, swap_costs: SwapCosts, clock: Callable[[], float]) -> None:
        self.num_given_up = 0
        """Requests that went on without what they waited for."""
        self.num_tokens = 0
        """Those of the prefixes that were there in time."""
        self._kv = kv
        self._swap_costs = swap_costs
        self._clock = clock
        self._waits: dict[Request, _Wait] = {}
        self._read_bytes = 0
        self._read_seconds = 0.0

    def __contains__(self, request: Request) -> bool:
        return request in self._waits

    def begin(self, request: Request) -> bool:
        """Begin to read what the disk alone has of the request's prefix, if that is sooner than
        computing it; whether the request waits for it."""
        begun = self._kv.read_from_disk(
            request.kv,
            request.namespace,
            request.token_ids[: request.num_reusable_tokens + 1],
            self._swap_costs.pays_to_read,
        )
        if not begun.places:
            return False
        patience = self._swap_costs.compute_seconds(begun.num_tokens)
        until = self._clock() + (PATIENCE_SECONDS if patience is None else patience)
        self._waits[request] = _Wait(begun.places, begun.num_tokens, until)
        return True

    def forget(self, request: Request) -> None:
        """The request ends, whether it waits or not."""
        self._waits.pop(request, None)

    def poll(self) -> list[Request]:
        """The requests that need not wait longer. Behind `DiskTier.poll`."""
        if not self._waits:
            return []
        self._learn()
        return [request for request, wait in list(self._waits.items()) if self._ends(request, wait)]

    def _learn(self) -> None:
        """Learn from the reads since the last call what reading costs."""
        disk = self._kv.disk
        assert disk is not None, "nobody waits for a disk that is not there"
        num_bytes, seconds = disk.counts.read_bytes, disk.counts.read_seconds
        if num_bytes > self._read_bytes:
            self._swap_costs.observe_read(
                num_bytes - self._read_bytes, seconds - self._read_seconds
            )
            self._read_bytes, self._read_seconds = num_bytes, seconds

    def _ends(self, request: Request, wait: _Wait) -> bool:
        disk = self._kv.disk
        assert disk is not None, "nobody waits for a disk that is not there"
        is_coming = any(map(disk.is_coming, wait.places))
        if is_coming and self._clock() < wait.until:
            return False
        self.num_given_up += is_coming
        self.num_tokens += 0 if is_coming else wait.num_tokens
        del self._waits[request]
        return True
