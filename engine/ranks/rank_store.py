"""The store through which the ranks' process groups find each other, over the ranks' own links.

torch's own stores for several hosts listen without authentication: whoever sets a key there could
join the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store

from .commands import StoreGet, StoreSet, StoreValue
from .rank_pipe import FollowerPipe


class Values(Protocol):
    """Where the values are."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        """Waits until it is set."""
        ...


class RankStore(Store):
    """What torch reads and sets. Hold it for as long as a process group uses it."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._values.set(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._values.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._values.get(key)


class FollowerValues:
    """Rank 0 keeps them."""

    def __init__(self, pipe: FollowerPipe) -> None:
        """`pipe`: on which no command comes while a value is awaited."""
        self._pipe = pipe

    def set(self, key: str, value: bytes) -> None:
        """Raises OSError."""
        self._pipe.send(StoreSet(key, value))

    def get(self, key: str) -> bytes:
        """Raises EOFError, OSError."""
        self._pipe.send(StoreGet(key))
        answer = self._pipe.receive()
        assert isinstance(answer, StoreValue), "rank 0 sends commands once all are connected"
        return answer.value
