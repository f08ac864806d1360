"""Deletions of adapters: from the first refused lease to the last zeroed byte.

The device's bytes are zeroed by `Erasures`, those of host memory by a job of the loader threads; a
deletion is complete when both are done, and no lease, read, copy or move names the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, NamedTuple

from .identity import AdapterKey
from .loaders import Loaders
from .memories import BlockT, Host
from .record import Failure

DELETED = Failure("adapter_deleted", "The adapter version was deleted.")
DELETING = "deleting"
"""The state of an adapter from the beginning of its deletion, in histories and explanations."""


class Evicted(NamedTuple):
    """An adapter whose deletion is complete, and its sizes in this engine at the beginning."""

    key: AdapterKey
    device_bytes: int
    host_bytes: int


@dataclass
class _Retirement:
    device_bytes: int
    host_bytes: int = 0
    is_off_device: bool = False
    """Its record is removed; the arena may still be zeroing."""
    erasing_host: Future[None] | None = None


class Retirements(Generic[BlockT]):
    """The adapters that are being deleted."""

    def __init__(self, host: Host[BlockT], loaders: Loaders) -> None:
        self._host = host
        self._loaders = loaders
        self.open: dict[AdapterKey, _Retirement] = {}
        """The deletions that are not complete."""
        self._evicted: list[Evicted] = []

    def __contains__(self, key: object) -> bool:
        """Whether it, or a part of it, is being deleted."""
        return key in self.open or (
            isinstance(key, AdapterKey) and any(part in self.open for part in key.parts)
        )

    @property
    def has_work(self) -> bool:
        """Whether a deletion is complete or proceeds without calls; only calls end leases."""
        waits_for_jobs = any(r.is_off_device for r in self.open.values())
        return waits_for_jobs or bool(self._evicted)

    def begin(self, key: AdapterKey, device_bytes: int) -> None:
        """Start the deletion of an adapter. May be repeated."""
        self.open.setdefault(key, _Retirement(device_bytes))

    def keys_on_device(self) -> list[AdapterKey]:
        """The adapters that wait for their last use to end."""
        return [key for key, r in self.open.items() if not r.is_off_device]

    def leave_device(self, key: AdapterKey) -> None:
        """Nothing uses the adapter any more: zero its block in host memory."""
        retirement = self.open[key]
        retirement.is_off_device = True
        if self._host.holds(key):
            retirement.host_bytes = self._host.size_of(key)
            retirement.erasing_host = self._begin_erasing(key, retirement)

    def finish(self, is_erasing: Callable[[AdapterKey], bool]) -> bool:
        """Process completed steps; `is_erasing`: the arena is not zeroed yet."""
        changed = False
        for key, retirement in list(self.open.items()):
            job = retirement.erasing_host
            if job is not None and job.done():
                is_failed = job.exception() is not None
                retirement.erasing_host = (
                    self._begin_erasing(key, retirement) if is_failed else None
                )
            is_busy = retirement.erasing_host is not None or is_erasing(key)
            if retirement.is_off_device and not is_busy:
                del self.open[key]
                self._evicted.append(Evicted(key, retirement.device_bytes, retirement.host_bytes))
                changed = True
        return changed

    def take_evicted(self) -> list[Evicted]:
        """The adapters completed since the last call, each once."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _begin_erasing(self, key: AdapterKey, retirement: _Retirement) -> Future[None]:
        return self._loaders.submit(retirement.host_bytes, self._host.remove, key)
