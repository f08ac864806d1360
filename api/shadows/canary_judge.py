"""Has a judge compare the answers of the two versions of an alias with a canary.

A share of the alias's requests is answered by the other version too. The judge sees each pair in
both orders. Prompts and answers are in memory only, until the comparison has ended. All requests
are background requests, and charged to the caller's tenant as they complete.
"""

from __future__ import annotations

import asyncio
from statistics import fmean

import structlog

from ...engine.errors import EngineError
from ...platform.adapters.canary_sums import Arm
from ...platform.adapters.registry import Rival
from ...platform.errors import PlatformError
from ..contract.errors import ApiError
from ..evaluation.judge import TIE_SCORE, Comparison
from ..inference.inference import Inference
from ..inference.live_answers import AnswerQueue, LiveAnswer
from ..telemetry.canary_watch import CanaryWatch
from ..telemetry.metrics import Metrics
from .background import Background, copy_of
from .copies import Copies
from .judge_order import answer_of, order_judge

log = structlog.get_logger(__name__)

NO_VERDICT = "no_verdict"
"""In the log: the judge's output ended before its verdict."""


class CanaryJudge:
    """One per server."""

    def __init__(
        self,
        queue: AnswerQueue[Rival],
        *,
        inference: Inference,
        background: Background,
        canary_watch: CanaryWatch,
        metrics: Metrics,
    ) -> None:
        self._inference = inference
        self._background = background
        self._canary_watch = canary_watch
        self._copies = Copies(queue, self._judge, metrics.canary_comparisons)

    def start(self) -> None:
        self._copies.start()

    async def close(self) -> None:
        await self._copies.close()

    async def _judge(self, live: LiveAnswer[Rival]) -> str:
        """Compare, and count the canary's score; what became of it. What fails is no evidence."""
        arm = _arm_of(live)
        try:
            score = await self._score_of_live(live)
        except (ApiError, EngineError, PlatformError, ValueError) as exc:
            log.info(
                "canary_not_judged",
                tenant_id=arm.split.tenant_id,
                adapter=arm.split.adapter_name,
                alias=arm.split.alias,
                judge=live.other.judge,
                error=getattr(exc, "code", NO_VERDICT),
            )
            return "failed"
        self._canary_watch.add_score(arm.split, score if arm.is_canary else 1 - score)
        return "judged"

    async def _score_of_live(self, live: LiveAnswer[Rival]) -> float:
        """The mean score of the live answer, over both orders; equal answers are a tie."""
        answered = await self._background.answer(copy_of(live.order, live.other.version))
        pair = await asyncio.to_thread(self._comparison, live, answered.text)
        if pair.first == pair.second:
            return TIE_SCORE
        first = await self._score_of_first(live, pair)
        return fmean((first, 1 - await self._score_of_first(live, pair.swapped)))

    async def _score_of_first(self, live: LiveAnswer[Rival], pair: Comparison) -> float:
        asked = await order_judge(
            self._inference, live.order.principal, live.other.judge, pair.question
        )
        return asked.score_of_first((await self._background.answer(asked.order)).text)

    def _comparison(self, live: LiveAnswer[Rival], other_text: str) -> Comparison:
        """The live answer, then the other one, as callers see them."""
        order, inference = live.order, self._inference
        plan = inference.prompts.plan_answer(None, form_grammar=None, reasoning=order.reasoning)
        request = inference.tokenizer_of(order.model).decode(order.prompts[0])
        return Comparison(request, answer_of(plan, live.text), answer_of(plan, other_text))


def _arm_of(live: LiveAnswer[Rival]) -> Arm:
    adapter = live.order.model.adapter
    assert adapter is not None, "the base has no aliases"
    assert adapter.arm is not None, "an alias with a judge is watched"
    return adapter.arm
