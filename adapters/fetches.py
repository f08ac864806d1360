"""Messages for the fetcher: the adapters to fetch, and those whose files were read."""

from __future__ import annotations

from .identity import AdapterKey


class Fetches:
    """They are kept until the engine's loop takes them after a step."""

    def __init__(self) -> None:
        self.wanted: list[AdapterKey] = []
        self.read: list[AdapterKey] = []

    def want(self, key: AdapterKey) -> None:
        self.wanted.append(key)

    def note_read(self, key: AdapterKey) -> None:
        self.read.append(key)

    def take_wanted(self) -> list[AdapterKey]:
        """The adapters to fetch. `fetched` or `fetch_failed` answers each, in any order."""
        wanted, self.wanted = self.wanted, []
        return wanted

    def take_read(self) -> list[AdapterKey]:
        """The adapters whose fetched files were read, or could not be. Send these first, because a
        missing file is fetched again."""
        read, self.read = self.read, []
        return read
