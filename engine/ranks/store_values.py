"""The values through which the ranks of a group find each other. Rank 0 keeps them. Torch-free."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Lock

from ..errors import RankLost


class StoreValues:
    """Each is set once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, Future[bytes]] = {}
        self._lost: RankLost | None = None

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        with suppress(InvalidStateError):  # a rank is lost
            self.ask(key).set_result(value)

    def get(self, key: str) -> bytes:
        """A value, once it is set. Raises RankLost if a rank is lost."""
        return self.ask(key).result()

    def ask(self, key: str) -> Future[bytes]:
        """A value that may not be set yet."""
        with self._lock:
            if key not in self._values:
                self._values[key] = Future()
                if self._lost is not None:
                    self._values[key].set_exception(self._lost)
            return self._values[key]

    def lose(self, error: RankLost) -> None:
        """Whoever waits for a value gets this error."""
        with self._lock:
            self._lost = error
            waiting = [future for future in self._values.values() if not future.done()]
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(error)
