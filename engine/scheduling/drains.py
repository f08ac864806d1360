"""Deletions of adapters whose requests may still run: who may finish, until when, and the receipt.

Torch-free, like the scheduler that it acts on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...adapters.identity import AdapterKey
from ...adapters.manager import AdapterManager, Evicted
from ..errors import AdapterDeleted
from ..kv.blocks import KvBlocks
from ..messages import EvictionReceipt
from ..request import Request
from .scheduler import Scheduler


@dataclass(slots=True)
class _Drain:
    """One deletion that has not been answered."""

    begun_at: float
    deadline: float
    open_keys: set[AdapterKey]
    """What is still in memory: the adapter, and its compositions."""
    num_drained: int = 0
    num_aborted: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    is_dropped: bool = False
    """Whether its cached prefixes are dropped, in all tiers."""

    def note_evicted(self, evicted: Evicted) -> None:
        if evicted.key in self.open_keys:
            self.open_keys.remove(evicted.key)
            self.device_bytes += evicted.device_bytes
            self.host_bytes += evicted.host_bytes


class Drains:
    """The engine's deletions, from EvictAdapter to the receipt."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        manager: AdapterManager[Any],
        kv: KvBlocks,
        clock: Callable[[], float],
        abort: Callable[[Request, AdapterDeleted], None],
        forget_outputs: Callable[[AdapterKey], None],
    ) -> None:
        """`abort` ends a request and announces its end, through `note_end` too. `forget_outputs`
        drops what later requests might be drafted from."""
        self._scheduler = scheduler
        self._manager = manager
        self._kv = kv
        self._clock = clock
        self._abort = abort
        self._forget_outputs = forget_outputs
        self.open: dict[AdapterKey, _Drain] = {}
        """The deletions that are not complete."""

    def __contains__(self, key: AdapterKey | None) -> bool:
        """Whether no request for this adapter is taken."""
        return key is not None and any(part in self.open for part in key.parts)

    def begin(self, key: AdapterKey, drain_seconds: float) -> None:
        """Refuse the adapter and its compositions from now on. End their waiting requests, and by
        the deadline the running ones."""
        now = self._clock()
        drain = self.open.get(key)
        if drain is None:
            doomed = {key, *self._manager.compositions_of(key)}
            drain = self.open[key] = _Drain(now, now + drain_seconds, doomed)
        drain.deadline = min(drain.deadline, now + drain_seconds)
        for each in drain.open_keys:
            self._manager.evict(each)
        self._end_hopeless(key, drain)

    def note_end(self, request: Request, *, is_deleted: bool) -> None:
        """A request has ended, with `adapter_deleted` or in any other way."""
        if not self.open or request.adapter is None:
            return
        for key in request.adapter.parts:
            drain = self.open.get(key)
            if drain is None:
                continue
            drain.num_aborted += is_deleted
            drain.num_drained += not is_deleted
            if not self._requests(key):
                self._drop(key, drain)

    def poll(self) -> list[tuple[AdapterKey, EvictionReceipt]]:
        """End whose time is up; return the deletions that are complete, each once.

        Behind `AdapterManager.poll`.
        """
        for key, drain in self.open.items():
            self._end_hopeless(key, drain)
        for evicted in self._manager.take_evicted():
            for drain in self.open.values():
                drain.note_evicted(evicted)
        complete = [key for key, drain in self.open.items() if self._is_complete(key, drain)]
        return [(key, self._receipt(self.open.pop(key))) for key in complete]

    def _receipt(self, drain: _Drain) -> EvictionReceipt:
        return EvictionReceipt(
            device_bytes=drain.device_bytes,
            host_bytes=drain.host_bytes,
            num_drained=drain.num_drained,
            num_aborted=drain.num_aborted,
            seconds=self._clock() - drain.begun_at,
        )

    def _end_hopeless(self, key: AdapterKey, drain: _Drain) -> None:
        """End all once the deadline has come, and before it who holds no lease: it gets none."""
        is_over = self._clock() >= drain.deadline
        requests = self._requests(key)
        for request in requests:
            if is_over or request.lease is None:
                self._abort(request, AdapterDeleted())
        if not requests:
            self._drop(key, drain)

    def _drop(self, key: AdapterKey, drain: _Drain) -> None:
        """Drop the prefixes and outputs of an adapter whose requests have ended."""
        self._kv.drop_adapter(key)
        if not drain.is_dropped:
            drain.is_dropped = True
            self._forget_outputs(key)
            self._kv.erase_on_disk(key)

    def _is_complete(self, key: AdapterKey, drain: _Drain) -> bool:
        return not drain.open_keys and not self._kv.is_erasing(key)

    def _requests(self, key: AdapterKey) -> list[Request]:
        return [each for each in self._scheduler.requests() if each.submitted.uses(key)]
