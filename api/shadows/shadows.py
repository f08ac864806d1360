"""Has shadows answer copies of live requests, and keeps what the comparisons sum up to.

A copy is a background request: the engine runs it only while it has no other. Its text is compared
and forgotten. It is charged to the tenant when it is complete.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import replace
from functools import partial

import structlog

from ...engine.errors import EngineError
from ...platform.adapters import shadow_sums
from ...platform.adapters.registry import AdapterRef
from ...platform.adapters.shadow_sums import Compared
from ...platform.base import utc_now
from ...platform.errors import PlatformError
from ..contract.errors import ApiError, as_api_error
from ..control_plane.background_loop import BackgroundLoop
from ..control_plane.control_plane import ControlPlane
from ..evaluation.scorers import rouge_l
from ..inference.held_charge import HeldCharge
from ..inference.inference import Inference
from ..inference.live_answers import LiveAnswer, LiveAnswers
from ..inference.metering import Metering
from ..inference.order import Order
from ..inference.served_models import ServedModel
from ..telemetry.canary_watch import is_of_version
from ..telemetry.metrics import Metrics
from ..telemetry.request_measures import RequestMeasures

log = structlog.get_logger(__name__)

NUM_AT_ONCE = 2
"""Copies in the engine: others wait in memory, and then are dropped."""


IS_WAITING = "adapter_loading"
"""Of a copy that the engine has held back for so long, too."""


class Shadows:
    """One per server."""

    def __init__(
        self,
        live_answers: LiveAnswers,
        *,
        inference: Inference,
        metering: Metering,
        control_plane: ControlPlane,
        metrics: Metrics,
    ) -> None:
        self._live_answers = live_answers
        self._inference = inference
        self._metering = metering
        self._control_plane = control_plane
        self._metrics = metrics
        self._loops = [BackgroundLoop(self._run) for _ in range(NUM_AT_ONCE)]

    def start(self) -> None:
        for loop in self._loops:
            loop.start()

    async def close(self) -> None:
        """Stop; running copies are not charged, and waiting ones are forgotten."""
        await asyncio.gather(*(loop.close() for loop in self._loops))

    async def _run(self) -> None:
        while True:
            live = await self._live_answers.take()
            try:
                outcome = await self._answer(live)
            except PlatformError as exc:
                log.warning("shadow_dropped", version=live.shadow.version.pinned, error=str(exc))
                outcome = "dropped"
            except Exception:  # a defect at one copy must not stop the others
                log.exception("shadow_failed", version=live.shadow.version.pinned)
                outcome = "dropped"
            self._metrics.shadow_requests.labels(outcome).inc()

    async def _answer(self, live: LiveAnswer) -> str:
        """Answer and compare; what became of it."""
        held = HeldCharge()
        try:
            text, num_tokens = await self._generate(copy_of(live.order, live.shadow.version, held))
        except (ApiError, EngineError) as exc:
            code = as_api_error(exc).code
            if code == IS_WAITING or not is_of_version(code):
                log.info("shadow_dropped", version=live.shadow.version.pinned, error=str(exc))
                return "dropped"
            await self._add(live, None)
            return "failed"
        else:
            await self._metering.commit(held, lambda session: True)
            await self._add(live, await asyncio.to_thread(compare, live, text, num_tokens))
            return "compared"
        finally:
            await self._metering.drop(held)

    async def _generate(self, order: Order) -> tuple[str, int]:
        running = await self._inference.start(order)
        try:
            (deltas,) = await running.generation.whole()
        finally:
            await running.generation.aclose()
        text = "".join(delta.text for delta in deltas)
        return text, running.generation.counts.num_completion_tokens

    async def _add(self, live: LiveAnswer, compared: Compared | None) -> None:
        split, version = live.shadow.split, live.shadow.version.version
        add = partial(shadow_sums.add, split=split, version_number=version, compared=compared)
        await self._control_plane.write(split.tenant_id, add)


def copy_of(order: Order, version: AdapterRef, held: HeldCharge) -> Order:
    """The same order for another version, in the background and without a deadline."""
    return replace(
        order,
        request_id=f"shadow-{secrets.token_hex(12)}",
        arrived_at=time.monotonic(),
        admitted_at=utc_now(),
        model=ServedModel(version.pinned, version, order.model.own_tokenizer),
        deadline_ms=None,
        held_charge=held,
        measures=RequestMeasures(),
    )


def compare(live: LiveAnswer, text: str, num_tokens: int) -> Compared:
    """The shadow's answer beside the live one."""
    return Compared(
        is_equal=text == live.text,
        rouge=rouge_l(text, live.text),
        log_length_ratio=math.log(max(num_tokens, 1) / max(live.num_tokens, 1)),
    )
