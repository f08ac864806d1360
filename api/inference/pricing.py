"""The prices that a server charges by: a copy of the table, a few seconds old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...platform.prices.book import NO_BOOK, PriceBook, Tariff
from ...platform.prices.service import read_book
from ..control_plane.control_plane import ControlPlane

REUSE_SECONDS = 5.0
"""Much less than the time from the setting of a price to its effect (`prices.service.LEAD`), so a
copy of this age has every price that is in effect."""


class Pricing:
    """Finds the prices of tenants; one for the server."""

    def __init__(
        self,
        control_plane: ControlPlane,
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: the name of the base that the server serves."""
        self._control_plane = control_plane
        self._model = model
        self._clock = clock
        self._book: PriceBook = NO_BOOK
        self._fresh_until: float | None = None
        self._reading = asyncio.Lock()

    async def tariff(self, tenant_id: str) -> Tariff:
        """The tenant's prices of the served base. Raises a PlatformError if they cannot be read."""
        return (await self.book()).tariff(self._model, tenant_id)

    async def book(self) -> PriceBook:
        """All prices. Raises a PlatformError if they cannot be read."""
        if not self._is_fresh():
            async with self._reading:
                if not self._is_fresh():
                    await self._read()
        return self._book

    def _is_fresh(self) -> bool:
        return self._fresh_until is not None and self._clock() < self._fresh_until

    async def _read(self) -> None:
        began = self._clock()
        known = self._book
        self._book = await self._control_plane.read_all_tenants(
            lambda session: read_book(session, known)
        )
        self._fresh_until = began + REUSE_SECONDS
