"""What an engine's client tells of its engine besides the requests."""

from __future__ import annotations

from ...adapters.identity import AdapterKey
from ..messages import EngineCrashed, EngineStats, PrefixPiece


class EngineObserver:
    """Is told of the engine's changes; this one ignores them. Its methods must not raise."""

    def note_state(self) -> None:
        """The engine's state has changed."""

    def note_stats(self, stats: EngineStats) -> None:
        """The engine has sent a snapshot: `adapters` are those that changed since the last one."""

    def note_prefix(self, piece: PrefixPiece) -> None:
        """The engine has sent a part of a prefix that a request exports."""

    def note_crash(self, crash: EngineCrashed) -> None:
        """The engine has ended in a step, after `note_state`."""

    def note_proven(self, key: AdapterKey) -> None:
        """The adapter's answers have become its proof; see `Quarantine.is_proven`."""
