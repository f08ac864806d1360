"""Has shadows answer copies of live requests, and keeps what the comparisons sum up to.

A copy is a background request: the engine runs it only while it has no other. Its text is compared
and forgotten. It is charged to the tenant when it is complete.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial

import structlog

from ...engine.errors import EngineError
from ...platform.adapters import shadow_sums
from ...platform.adapters.registry import Shadow
from ...platform.adapters.shadow_sums import Compared
from ..contract.errors import ApiError, as_api_error
from ..control_plane.control_plane import ControlPlane
from ..evaluation.scorers import rouge_l
from ..inference.live_answers import AnswerQueue, LiveAnswer
from ..telemetry.canary_watch import is_of_version
from ..telemetry.metrics import Metrics
from .background import Answered, Background, copy_of
from .copies import Copies

log = structlog.get_logger(__name__)

IS_WAITING = "adapter_loading"
"""Of a copy that the engine has held back for so long, too."""


class Shadows:
    """One per server."""

    def __init__(
        self,
        queue: AnswerQueue[Shadow],
        *,
        background: Background,
        control_plane: ControlPlane,
        metrics: Metrics,
    ) -> None:
        self._background = background
        self._control_plane = control_plane
        self._copies = Copies(queue, self._answer, metrics.shadow_requests)

    def start(self) -> None:
        self._copies.start()

    async def close(self) -> None:
        await self._copies.close()

    async def _answer(self, live: LiveAnswer[Shadow]) -> str:
        """Answer and compare; what became of it."""
        shadow = live.other
        try:
            answered = await self._background.answer(copy_of(live.order, shadow.version))
        except (ApiError, EngineError) as exc:
            code = as_api_error(exc).code
            if code == IS_WAITING or not is_of_version(code):
                log.info("copy_dropped", version=shadow.version.pinned, error=str(exc))
                return "dropped"
            await self._add(shadow, None)
            return "failed"
        await self._add(shadow, await asyncio.to_thread(compare, live, answered))
        return "compared"

    async def _add(self, shadow: Shadow, compared: Compared | None) -> None:
        add = partial(
            shadow_sums.add,
            split=shadow.split,
            version_number=shadow.version.version,
            compared=compared,
        )
        await self._control_plane.write(shadow.split.tenant_id, add)


def compare(live: LiveAnswer[Shadow], answered: Answered) -> Compared:
    """The shadow's answer beside the live one."""
    return Compared(
        is_equal=answered.text == live.text,
        rouge=rouge_l(answered.text, live.text),
        log_length_ratio=math.log(max(answered.num_tokens, 1) / max(live.num_tokens, 1)),
    )
