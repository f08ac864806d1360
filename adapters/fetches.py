"""Messages for the fetcher: the adapters to fetch, and those whose files were read."""

from __future__ import annotations

from .identity import AdapterKey


class Fetches:
    """They are kept until the engine's loop takes them after a step."""

    def __init__(self) -> None:
        self._wanted: list[AdapterKey] = []
        self._read: list[AdapterKey] = []

    def __bool__(self) -> bool:
        """Whether there are messages."""
        return bool(self._wanted or self._read)

    def want(self, key: AdapterKey) -> None:
        self._wanted.append(key)

    def note_read(self, key: AdapterKey) -> None:
        self._read.append(key)

    def take_wanted(self) -> list[AdapterKey]:
        """The adapters to fetch. `fetched` or `fetch_failed` answers each, in any order."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_read(self) -> list[AdapterKey]:
        """The adapters whose fetched files were read, or could not be. Send these first, because a
        missing file is fetched again."""
        read, self._read = self._read, []
        return read
