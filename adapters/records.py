"""The records of all adapters, and every change of their states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic

from .histories import Histories
from .identity import AdapterKey
from .load_times import LoadTimes
from .memories import BlockT
from .record import COMPLETES, Failure, Record, State


class Records(Generic[BlockT]):
    """The adapters that are on the device, being loaded, or failed. Others have at most a history.

    All state changes go through this class, so that histories and load times include them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.histories = Histories()
        self.load_times = LoadTimes()
        self._clock = clock
        self._records: dict[AdapterKey, Record[BlockT]] = {}
        self.loading: dict[AdapterKey, Record[BlockT]] = {}
        """Those that are being loaded to the device: neither RESIDENT nor FAILED."""
        self.changed: set[AdapterKey] = set()
        """Adapters whose state or leases changed since the last report, which clears the set."""
        self._waiting: dict[AdapterKey, Record[BlockT]] = {}
        """The records in state HOST."""
        self._num_begun = 0

    def __iter__(self) -> Iterator[Record[BlockT]]:
        return iter(self._records.values())

    def get(self, key: AdapterKey) -> Record[BlockT] | None:
        return self._records.get(key)

    def made_of(self, key: AdapterKey) -> list[Record[BlockT]]:
        """The records of an adapter and of its compositions."""
        return [record for record in self if record.key.has_part(key)]

    def resident(self, key: AdapterKey) -> Record[BlockT] | None:
        """The record of an adapter on the device; None if it is not there."""
        record = self._records.get(key)
        return record if record is not None and record.state is State.RESIDENT else None

    def waiting(self) -> list[Record[BlockT]]:
        """The records in host memory that wait for a place on the device."""
        return list(self._waiting.values())

    def begin(self, key: AdapterKey) -> Record[BlockT]:
        """A load begins; `enter` follows."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = Record(key)
        self._num_begun += 1
        record.begin(self._num_begun, self._clock())
        self.changed.add(key)
        return record

    def enter(self, record: Record[BlockT], state: State, failure: Failure | None = None) -> None:
        """`failure` goes with FAILED."""
        now = self._clock()
        if COMPLETES.get(record.state) is state:
            self.load_times.add(record.state, now - record.entered_at)
        record.enter(state, now, failure)
        self.changed.add(record.key)
        if state in (State.RESIDENT, State.FAILED):
            self.loading.pop(record.key, None)
        else:
            self.loading[record.key] = record
        if state is State.HOST:
            self._waiting[record.key] = record
        else:
            self._waiting.pop(record.key, None)
        self.note(record.key, state, failure.code if failure else None)

    def forget(self, key: AdapterKey, why: str | None = None) -> None:
        """Remove the record: the adapter is STORED again. `why` is added to its history."""
        del self._records[key]
        self.changed.add(key)
        self.loading.pop(key, None)
        self._waiting.pop(key, None)
        if why is not None:
            self.note(key, State.STORED, why)

    def note(self, key: AdapterKey, state: str, why: str | None) -> None:
        """Add to the adapter's history."""
        self.histories.note(key, state, self._clock(), why)
