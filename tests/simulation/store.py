"""A simulated adapter store and fetcher: slow, sometimes wrong, sometimes unavailable."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Protocol

from loraplex.adapters.errors import ObjectCorrupt
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier


class Answers(Protocol):
    """Who asked: `AdapterManager` takes both answers."""

    def fetched(self, key: AdapterKey, paths: Iterable[Path | str], tier: Tier) -> None: ...

    def fetch_failed(self, key: AdapterKey, code: str, message: str) -> None: ...


class FakeStore:
    """Answers wishes after a latency. `outage_until` makes all answers failures meanwhile."""

    def __init__(
        self, rng: Random, sizes: dict[AdapterKey, int], clock: Callable[[], float], mishaps: float
    ) -> None:
        self.outage_until = 0.0
        self.mishaps = mishaps
        self.files: dict[Path, int | Exception] = {}
        """What a read of a fetched file gives."""
        self.deleted: set[AdapterKey] = set()
        self._troubled: list[AdapterKey] = []
        self._rng = rng
        self._sizes = sizes
        self._clock = clock
        self._pending: list[tuple[float, int, AdapterKey]] = []
        self._num_wishes = 0

    def want(self, key: AdapterKey) -> None:
        self._num_wishes += 1
        latency = self._rng.choice((0.0, 0.002, 0.02, 0.1))
        heapq.heappush(self._pending, (self._clock() + latency, self._num_wishes, key))

    @property
    def next_answer(self) -> float | None:
        return self._pending[0][0] if self._pending else None

    def take_troubled(self) -> list[AdapterKey]:
        """Whose answers were failures since the last call."""
        troubled, self._troubled = self._troubled, []
        return troubled

    def forget_wishes(self) -> None:
        """The engine that asked is no more."""
        self._pending.clear()

    def answer(self, engine: Answers) -> None:
        """Give every answer that is due."""
        while self._pending and self._pending[0][0] <= self._clock():
            self._answer(heapq.heappop(self._pending)[2], engine)

    def _answer(self, key: AdapterKey, engine: Answers) -> None:
        if key in self.deleted:
            self._troubled.append(key)
            engine.fetch_failed(key, "object_not_found", "gone")
        elif self._clock() < self.outage_until or self._rng.random() < self.mishaps:
            self._troubled.append(key)
            engine.fetch_failed(key, "store_unavailable", "no answer")
        else:
            path = Path(key.tenant_id) / key.digest
            self.files[path] = self._file(key)
            engine.fetched(key, [path], self._rng.choice((Tier.STORE, Tier.DISK)))

    def _file(self, key: AdapterKey) -> int | Exception:
        if self._rng.random() < self.mishaps:
            self._troubled.append(key)
            return self._rng.choice((ObjectCorrupt(), FileNotFoundError()))
        return self._sizes[key]
