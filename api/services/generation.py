"""One caller's generation: several sequences of the engine as one stream of text.

A sequence is one choice for one prompt. `Generation` owns the engine requests behind them: whoever
starts it, or not, must `aclose` it, which ends what still runs and has it charged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...adapters.residency import Tier
from ...engine.client import EngineClient
from ...engine.messages import GenerationRequest, PromptRead, RequestStarted, TokensGenerated
from ...engine.request_stream import RequestEvent
from ...engine.tokenizer import Tokenizer
from ...platform.overview.figures import FigureSums
from ..errors import ApiError
from ..metrics import Metrics
from ..request_measures import RequestMeasures
from .sequence_text import Delta, SequenceText
from .sequence_times import ABORTED, FAILED, SequenceTimes

MAX_OPEN_SEQUENCES = 64
"""Of one HTTP request, in the engine at once: embeddings may have more."""


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to generate, and how its tokens become text."""

    index: int
    """The `index` of its choice."""
    request: GenerationRequest
    is_first_choice: bool
    """It accounts for its prompt; the further choices of the same prompt do not."""
    stop: tuple[str, ...]
    continues_prompt: bool
    """A plain completion, whose text goes on where the prompt's ends."""
    visible_token_ids: Collection[int] = ()
    """Special tokens that are part of the text."""


@dataclass(slots=True)
class TokenCounts:
    """What a generation has cost so far."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_draft_tokens: int = 0
    """Guessed for the answer."""
    num_accepted_tokens: int = 0
    """Guesses that stand in the answer."""

    def add_output(self, num_tokens: int, num_draft_tokens: int) -> None:
        """The tokens of one step that belong to the answer; the last of them is no guess."""
        self.num_completion_tokens += num_tokens
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_tokens - 1


class Outcome(NamedTuple):
    """What is metered at the end of a generation."""

    counts: TokenCounts
    """Of an answer that is not whole: what has come of it here, which may be less than was done."""
    tier: Tier | None
    """Where the adapter was when the request came."""
    finish_reason: str
    """Of the sequence that ended last; `aborted` if the answer is not whole."""
    load_ms: float | None = None
    """How long the load took that the request waited for."""


class Generation:
    """Runs the sequences of one HTTP request."""

    def __init__(
        self,
        sequences: Sequence[SequenceSpec],
        *,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        arrived_at: float,
        measures: RequestMeasures,
        meter: Callable[[Outcome], Awaitable[None]],
        figures: Callable[[], FigureSums] = FigureSums,
        deadline_at: float | None = None,
    ) -> None:
        """`meter` is told of the end exactly once, and before the last delta is given. `figures`:
        those of the tenant now.

        `arrived_at` and `deadline_at` on the monotonic clock.
        """
        self.counts = TokenCounts()
        self._sequences = sequences
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._figures = figures
        self._arrived_at = arrived_at
        self._measures = measures
        self._meter = meter
        self._deadline_at = deadline_at
        self._places = asyncio.Semaphore(MAX_OPEN_SEQUENCES)
        self._is_metered = False
        self._tier: Tier | None = None
        self._load_ms: float | None = None
        self._events: asyncio.Queue[RequestStarted | Delta | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self, *, is_loading: Callable[[], bool], patience_seconds: float
    ) -> RequestStarted:
        """Submit everything; return once the first sequence is scheduled.

        Raises ApiError: the engine's refusal, or `adapter_loading` if the patience is over and
        `is_loading` says that it is the adapter that is missing.
        """
        self._tasks = [asyncio.create_task(self._run(spec)) for spec in self._sequences]
        while True:
            try:
                async with asyncio.timeout(patience_seconds):
                    event = await self._events.get()
            except TimeoutError:
                if is_loading():
                    raise ApiError("adapter_loading") from None
                continue
            if isinstance(event, Exception):
                raise event
            assert isinstance(event, RequestStarted), "a sequence starts before it gives text"
            self._metrics.observe_start(event)
            self._measures.queue_seconds = event.queue_seconds
            self._measures.adapter_wait_seconds = event.adapter_wait_seconds
            self._tier = self._measures.tier = event.adapter_tier
            self._load_ms = self._measures.load_ms = event.adapter_load_ms
            return event

    async def deltas(self) -> AsyncIterator[Delta]:
        """All text, as it comes; metered before the last delta is given. Raises ApiError."""
        num_unfinished = len(self._sequences)
        while num_unfinished:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, RequestStarted):
                continue
            num_unfinished -= event.finish_reason is not None
            if not num_unfinished:
                await self._meter_once(event.finish_reason or ABORTED)
            yield event

    def cancel(self) -> None:
        """End it for somebody else than its caller, who gets `request_cancelled`."""
        self._events.put_nowait(ApiError("request_cancelled"))

    async def aclose(self) -> None:
        """End what still runs and meter it. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._meter_once(ABORTED)

    async def _meter_once(self, finish_reason: str) -> None:
        if not self._is_metered:
            self._is_metered = True
            self._measures.finish_reason = finish_reason
            self._measures.prompt_tokens = self.counts.num_prompt_tokens
            self._measures.cached_tokens = self.counts.num_cached_tokens
            self._measures.completion_tokens = self.counts.num_completion_tokens
            await self._meter(Outcome(self.counts, self._tier, finish_reason, self._load_ms))

    async def _run(self, spec: SequenceSpec) -> None:
        times = SequenceTimes(self._metrics, arrived_at=self._arrived_at, figures=self._figures)
        try:
            async with (
                self._places,
                aclosing(self._engine.submit(self._due(spec.request))) as events,
            ):
                times.ended(await self._follow(spec, events, times))
        except asyncio.CancelledError:
            times.ended(ABORTED)
            raise
        except Exception as exc:
            self._events.put_nowait(exc)
            times.ended(FAILED)

    def _due(self, request: GenerationRequest) -> GenerationRequest:
        """The request with what is left of the deadline."""
        if self._deadline_at is None:
            return request
        return replace(request, deadline_seconds=max(0.0, self._deadline_at - time.monotonic()))

    async def _follow(
        self,
        spec: SequenceSpec,
        events: AsyncIterator[RequestEvent],
        times: SequenceTimes,
    ) -> str:
        """Hand on what the engine says until the sequence ends; why it ended."""
        text = SequenceText(
            spec.index,
            spec.request,
            tokenizer=self._tokenizer,
            stop=spec.stop,
            continues_prompt=spec.continues_prompt,
            visible_token_ids=spec.visible_token_ids,
        )
        async for event in events:
            if isinstance(event, RequestStarted):
                self._count_prompt(spec, event)
                self._events.put_nowait(event)
                continue
            if isinstance(event, TokensGenerated):
                delta, num_tokens = text.push(event)
                self._take_time(times, num_tokens)
                self.counts.add_output(num_tokens, event.num_draft_tokens)
            elif isinstance(event, PromptRead):
                delta = text.read(event)
            else:
                delta = text.finish(event)
            self._events.put_nowait(delta)
            if delta.finish_reason:
                return delta.finish_reason
        return ABORTED

    def _count_prompt(self, spec: SequenceSpec, started: RequestStarted) -> None:
        if spec.is_first_choice:
            self.counts.num_prompt_tokens += len(spec.request.prompt_token_ids)
            self.counts.num_cached_tokens += started.num_cached_tokens

    def _take_time(self, times: SequenceTimes, num_tokens: int) -> None:
        times.tokens_came(num_tokens)
        if self._measures.first_token_seconds is None:
            self._measures.first_token_seconds = times.first_token_seconds
