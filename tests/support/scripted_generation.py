"""A generation with an engine whose events the test controls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, cast

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.api.contract.errors import ApiError
from loraplex.api.inference.generation import Generation, Outcome, SequenceSpec
from loraplex.api.inference.sequence_text import Delta
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.telemetry.request_measures import RequestMeasures
from loraplex.api.tools.reasoning import Reasoning
from loraplex.engine.messages import (
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    LatencyTargets,
    RequestFinished,
    RequestStarted,
    TokensGenerated,
)
from loraplex.engine.process.client import EngineClient
from loraplex.engine.process.request_end import RequestEnd
from loraplex.engine.process.request_stream import RequestEvent
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.text_form import TextForm
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.adapters.canary_sums import Arm

from .fake_engine import fake_info

Event = RequestStarted | TokensGenerated | RequestFinished
PROMPT = [65, 66, 67]


class ScriptedEngine:
    """Plays a list of events for every request, one a turn of the loop; a script that ends without
    a finish hangs.
    """

    info = fake_info("base")

    def __init__(self, *scripts: Sequence[Event]) -> None:
        self.scripts = list(scripts)
        self.closed: list[str] = []
        self.may_play = asyncio.Event()
        self.may_play.set()

    def submit(
        self, request: GenerationRequest, take: Callable[[RequestEvent], None], counter: object
    ) -> ScriptedStream:
        play = asyncio.create_task(self._play(self.scripts.pop(0), take))
        return ScriptedStream(play, lambda: self.closed.append(request.request_id), take)

    async def _play(self, script: Sequence[Event], take: Callable[[RequestEvent], None]) -> None:
        for event in script:
            await self.may_play.wait()
            take(event)
            await asyncio.sleep(0)


class ScriptedStream:
    """What a request's caller has of it; closed once."""

    def __init__(
        self,
        play: asyncio.Task[None],
        on_close: Callable[[], None],
        take: Callable[[RequestEvent], None],
    ) -> None:
        self.end = RequestEnd()
        self._play = play
        self._on_close = on_close
        self._take = take  # held as the engine's client does

    def close(self) -> None:
        self._play.cancel()
        self._on_close()


def started(num_cached: int = 0) -> RequestStarted:
    return RequestStarted("r", 0.5, 0.25, Tier.HOST, num_cached)


def finished(
    reason: FinishReason = FinishReason.LENGTH, code: str | None = None
) -> RequestFinished:
    error = ErrorInfo(code, "planted") if code else None
    return RequestFinished("r", reason, len(PROMPT), 0, error)


def script(*events: Event) -> list[Event]:
    return list(events)


class Scenario:
    """A generation over scripts, and what it metered."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *scripts: Sequence[Event],
        stop: tuple[str, ...] = (),
        visible_token_ids: Collection[int] = (),
        reasoning: Reasoning | None = None,
        arm: Arm | None = None,
        **sampling: Any,
    ) -> None:
        self.engine = ScriptedEngine(*scripts)
        self.outcomes: list[Outcome] = []
        self.metrics = Metrics(lambda: None)
        self.measures = RequestMeasures(arm=arm)
        self.fails_to_meter = False
        specs = [
            SequenceSpec(
                index=index,
                request=GenerationRequest(
                    f"r-{index}",
                    "tenant",
                    PROMPT,
                    SamplingParams(**sampling),
                    adapter=AdapterKey("tenant", "sha256:0"),
                    targets=LatencyTargets(ttft_seconds=60.0),
                ),
                counter=cast(Any, None),
                is_first_choice=index == 0,
                text=TextForm(stop=stop, visible_token_ids=visible_token_ids),
                reasoning=reasoning,
            )
            for index in range(len(scripts))
        ]
        self.generation = Generation(
            specs,
            engine=cast(EngineClient, self.engine),
            tokenizer=tokenizer,
            metrics=self.metrics,
            arrived_at=time.monotonic(),
            measures=self.measures,
            meter=self.meter,
        )

    async def meter(self, outcome: Outcome) -> None:
        if self.fails_to_meter:
            raise ApiError("database_unavailable")
        self.outcomes.append(outcome)

    @property
    def charged(self) -> list[tuple[str, int, int]]:
        """Of each outcome why it ended, and its tokens of prompt and output."""
        return [
            (outcome.finish_reason, counts.num_prompt_tokens, counts.num_completion_tokens)
            for outcome in self.outcomes
            for counts in [outcome.counts]
        ]

    async def start(self, *, is_loading: bool = False) -> RequestStarted:
        return await self.generation.start(is_loading=lambda: is_loading, patience_seconds=0.01)

    async def deltas(self) -> list[Delta]:
        """Everything, as it came."""
        await self.start()
        return [delta async for deltas in self.generation.deltas() for delta in deltas]

    async def text(self) -> tuple[str, str | None]:
        """Everything of the only choice, and why it ended."""
        deltas = await self.deltas()
        return "".join(delta.text for delta in deltas), deltas[-1].finish_reason


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)
