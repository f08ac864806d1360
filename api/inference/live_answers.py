"""A sample of the requests that aliases with shadows have answered, in memory only."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ...platform.adapters.canary import request_place
from ...platform.adapters.registry import Shadow
from ..telemetry.metrics import Metrics
from .order import Order

MAX_WAITING = 64
"""Texts of tenants, so not many."""


class LiveAnswer(NamedTuple):
    """What a caller ordered, and what it got."""

    order: Order
    shadow: Shadow
    text: str
    num_tokens: int


class LiveAnswers:
    """The answers that wait for a shadow; one for the server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: asyncio.Queue[LiveAnswer] = asyncio.Queue(MAX_WAITING)

    def offer(self, answer: LiveAnswer) -> None:
        """Add an answer; if too many wait, it is dropped and counted."""
        try:
            self._waiting.put_nowait(answer)
        except asyncio.QueueFull:
            self._metrics.shadow_requests.labels("dropped").inc()

    async def take(self) -> LiveAnswer:
        """The next answer, once there is one."""
        return await self._waiting.get()


def sampled_by(order: Order) -> Shadow | None:
    """The shadow that is to answer a copy of the order; None: none.

    Lines of batches, compositions, several choices or prompts, and vectors have no shadow, nor has
    a version with other tokens than the shadow's.
    """
    adapter = order.model.adapter
    if adapter is None or adapter.shadow is None or order.model.composition is not None:
        return None
    if adapter.shadow.version.added_tokens != adapter.added_tokens:
        return None
    if order.held_charge is not None or order.pooling is not None or order.num_sequences > 1:
        return None
    split = adapter.shadow.split
    place = request_place(split.adapter_id, f"shadow of {split.alias}", order.request_id)
    return adapter.shadow if place < adapter.shadow.percent else None
