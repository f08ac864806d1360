"""What the fetcher is to be told: which adapters are wanted here, and whose files were read."""

from __future__ import annotations

from .identity import AdapterKey


class Fetches:
    """Kept until the owner takes it along after a step."""

    def __init__(self) -> None:
        self._wanted: list[AdapterKey] = []
        self._read: list[AdapterKey] = []

    def __bool__(self) -> bool:
        """Whether there is something to take."""
        return bool(self._wanted or self._read)

    def want(self, key: AdapterKey) -> None:
        self._wanted.append(key)

    def note_read(self, key: AdapterKey) -> None:
        self._read.append(key)

    def take_wanted(self) -> list[AdapterKey]:
        """What to ask the fetcher for; `fetched` or `fetch_failed` answers each, in any order."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_read(self) -> list[AdapterKey]:
        """Whose fetched files were read, or could not be. Tell these first: a file that was gone is
        wanted again."""
        read, self._read = self._read, []
        return read
