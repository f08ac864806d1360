"""Answers in the background: the engine runs them only while it has no other request."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import NamedTuple

from ...platform.adapters.registry import AdapterRef
from ...platform.base import utc_now
from ..inference.held_charge import HeldCharge
from ..inference.inference import Inference
from ..inference.metering import Metering
from ..inference.order import Order
from ..inference.served_models import ServedModel
from ..telemetry.request_measures import RequestMeasures


class Answered(NamedTuple):
    """An answer that is charged."""

    text: str
    num_tokens: int


class Background:
    """One for the server."""

    def __init__(self, inference: Inference, metering: Metering) -> None:
        self._inference = inference
        self._metering = metering

    async def answer(self, order: Order) -> Answered:
        """The answer, once it is complete and charged. Raises ApiError, an EngineError or a
        PlatformError; then nothing is charged."""
        held = HeldCharge()
        try:
            answered = await self._generate(replace(order, held_charge=held))
            await self._metering.commit(held, lambda session: True)
        finally:
            await self._metering.drop(held)
        return answered

    async def _generate(self, order: Order) -> Answered:
        running = await self._inference.start(order)
        try:
            (deltas,) = await running.generation.whole()
        finally:
            await running.generation.aclose()
        text = "".join(delta.text for delta in deltas)
        return Answered(text, running.generation.counts.num_completion_tokens)


def copy_of(order: Order, version: AdapterRef) -> Order:
    """The same order for another version, without a deadline; no sample is kept of it."""
    return replace(
        order,
        request_id=f"shadow-{secrets.token_hex(12)}",
        arrived_at=time.monotonic(),
        admitted_at=utc_now(),
        model=ServedModel(version.pinned, version, order.model.own_tokenizer),
        deadline_ms=None,
        sample=None,
        measures=RequestMeasures(),
    )
