"""An event loop whose time passes only while nothing is ready to run."""

from __future__ import annotations

import asyncio
import selectors


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is planned, so time would stand still"
        self.now += max(0.0, timeout)
        return super().select(0.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Seconds since its start are the sums of its waits: a minute of timers takes no time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now
