"""What the fetcher is to be told: which adapters are wanted here, and whose files were read."""

from __future__ import annotations

from .identity import AdapterKey


class Fetches:
    """Kept until the owner takes it along after a step."""

    def __init__(self) -> None:
        self.wanted: list[AdapterKey] = []
        self.read: list[AdapterKey] = []

    def want(self, key: AdapterKey) -> None:
        self.wanted.append(key)

    def note_read(self, key: AdapterKey) -> None:
        self.read.append(key)

    def take_wanted(self) -> list[AdapterKey]:
        """What to ask the fetcher for; `fetched` or `fetch_failed` answers each, in any order."""
        wanted, self.wanted = self.wanted, []
        return wanted

    def take_read(self) -> list[AdapterKey]:
        """Whose fetched files were read, or could not be. Tell these first: a file that was gone is
        wanted again."""
        read, self.read = self.read, []
        return read
