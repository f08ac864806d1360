"""One caller's generation: several sequences of the engine as one stream of text.

A sequence is one choice for one prompt. `Generation` owns the engine requests behind them: whoever
starts it, or not, must `aclose` it, which ends what still runs and has it charged.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ...adapters.manager import Tier
from ...engine.messages import GenerationRequest, PromptRead, RequestStarted, TokensGenerated
from ...engine.process.client import EngineClient
from ...engine.process.request_stream import RequestEvent, RequestStream
from ...engine.text.tokenizer import Tokenizer
from ...platform.overview.figures import FigureSums
from ..contract.errors import ApiError
from ..telemetry.metrics import Metrics
from ..telemetry.request_measures import RequestMeasures
from .arrivals import Arrivals
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


@dataclass(slots=True)
class _OpenSequence:
    """A sequence that the engine has been given and that has not ended."""

    spec: SequenceSpec
    text: SequenceText
    times: SequenceTimes
    stream: RequestStream | None = None
    """None: it is just being submitted."""


def _leave(_: Delta) -> bool:
    return False


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
        self._waiting = deque(sequences)
        """Those that the engine has not been given yet."""
        self._open: dict[int, _OpenSequence] = {}
        """By the index of the choice."""
        self._arrivals = Arrivals()
        self._is_metered = False
        self._finish_reason = ABORTED
        """Of the sequence that ended last."""
        self._tier: Tier | None = None
        self._load_ms: float | None = None

    async def start(
        self, *, is_loading: Callable[[], bool], patience_seconds: float
    ) -> RequestStarted:
        """Submit everything; return once the first sequence is scheduled.

        Raises ApiError or an EngineError: the engine's refusal, or `adapter_loading` if the
        patience is over and `is_loading` says that it is the adapter that is missing.
        """
        self._submit_waiting()
        while True:
            try:
                async with asyncio.timeout(patience_seconds):
                    started = await self._arrivals.first()
            except TimeoutError:
                if is_loading():
                    raise ApiError("adapter_loading") from None
                continue
            self._metrics.starts.observe(started)
            self._measures.queue_seconds = started.queue_seconds
            self._measures.adapter_wait_seconds = started.adapter_wait_seconds
            self._tier = self._measures.tier = started.adapter_tier
            self._load_ms = self._measures.load_ms = started.adapter_load_ms
            return started

    async def deltas(self, take: Callable[[Delta], bool] = _leave) -> AsyncIterator[list[Delta]]:
        """All text, as it comes: each time what has come since. Metered before the last deltas are
        given. Raises ApiError or an EngineError, or what `take` raised.

        `take` is offered each delta that comes while this iteration is waited in and that does not
        end its choice: what it takes, by True, is not given here, and nobody wakes up for it.
        """
        num_unfinished = len(self._sequences)
        while num_unfinished:
            deltas = await self._arrivals.next(take)
            for delta in deltas:
                num_unfinished -= delta.finish_reason is not None
            if not num_unfinished:
                await self._meter_once(self._finish_reason)
            yield deltas

    async def whole(self) -> list[list[Delta]]:
        """All deltas of each choice, once everything is there and metered. Raises ApiError or an
        EngineError.
        """
        by_choice = await self._arrivals.all()
        await self._meter_once(self._finish_reason)
        return [by_choice[spec.index] for spec in self._sequences]

    def cancel(self) -> None:
        """End it for somebody else than its caller, who gets `request_cancelled`."""
        self._arrivals.fail(ApiError("request_cancelled"))

    async def aclose(self) -> None:
        """End what still runs and meter it. Idempotent."""
        self._waiting.clear()
        for sequence in list(self._open.values()):
            self._end(sequence, ABORTED)
        await self._meter_once(ABORTED)

    async def _meter_once(self, finish_reason: str) -> None:
        if not self._is_metered:
            self._is_metered = True
            self._measures.finish_reason = finish_reason
            self._measures.prompt_tokens = self.counts.num_prompt_tokens
            self._measures.cached_tokens = self.counts.num_cached_tokens
            self._measures.completion_tokens = self.counts.num_completion_tokens
            await self._meter(Outcome(self.counts, self._tier, finish_reason, self._load_ms))

    def _submit_waiting(self) -> None:
        """Give the engine the next sequences, as many as may be open."""
        while self._waiting and len(self._open) < MAX_OPEN_SEQUENCES:
            self._submit(self._waiting.popleft())

    def _submit(self, spec: SequenceSpec) -> None:
        sequence = _OpenSequence(
            spec,
            SequenceText(
                spec.index,
                spec.request,
                tokenizer=self._tokenizer,
                stop=spec.stop,
                continues_prompt=spec.continues_prompt,
                visible_token_ids=spec.visible_token_ids,
            ),
            SequenceTimes(self._metrics, arrived_at=self._arrived_at, figures=self._figures),
        )
        self._open[spec.index] = sequence
        try:
            sequence.stream = self._engine.submit(
                self._due(spec.request), partial(self._take, sequence)
            )
        except Exception as exc:
            self._fail(sequence, exc)

    def _due(self, request: GenerationRequest) -> GenerationRequest:
        """The request with what is left of the deadline."""
        if self._deadline_at is None:
            return request
        return replace(request, deadline_seconds=max(0.0, self._deadline_at - time.monotonic()))

    def _take(self, sequence: _OpenSequence, event: RequestEvent) -> None:
        """The engine says something: what it means is ready before anybody asks for it, so a stop
        string ends its sequence even if nobody reads.
        """
        try:
            delta = self._read(sequence, event)
            if delta is not None:
                self._arrivals.add(delta)
                if delta.finish_reason is not None:
                    self._end_well(sequence, delta.finish_reason)
        except Exception as exc:  # is this caller's alone: the engine's client has others
            self._fail(sequence, exc)

    def _end_well(self, sequence: _OpenSequence, finish_reason: str) -> None:
        self._finish_reason = finish_reason
        self._end(sequence, finish_reason)
        self._submit_waiting()
        if not self._open:
            self._arrivals.end()

    def _read(self, sequence: _OpenSequence, event: RequestEvent) -> Delta | None:
        if isinstance(event, TokensGenerated):
            delta, num_tokens = sequence.text.push(event)
            sequence.times.tokens_came(num_tokens)
            if self._measures.first_token_seconds is None:
                self._measures.first_token_seconds = sequence.times.first_token_seconds
            self.counts.add_output(num_tokens, event.num_draft_tokens)
            return delta
        if isinstance(event, RequestStarted):
            self._count_prompt(sequence.spec, event)
            self._arrivals.start(event)
            return None
        if isinstance(event, PromptRead):
            return sequence.text.read(event)
        return sequence.text.finish(event)

    def _fail(self, sequence: _OpenSequence, exc: Exception) -> None:
        self._waiting.clear()
        self._end(sequence, FAILED)
        self._arrivals.fail(exc)

    def _end(self, sequence: _OpenSequence, finish_reason: str) -> None:
        """Nothing more of this sequence is wanted. Idempotent."""
        if self._open.pop(sequence.spec.index, None) is None:
            return
        sequence.times.ended(finish_reason)
        stream, sequence.stream = sequence.stream, None  # they hold each other
        if stream is not None:
            stream.close()

    def _count_prompt(self, spec: SequenceSpec, started: RequestStarted) -> None:
        if spec.is_first_choice:
            self.counts.num_prompt_tokens += len(spec.request.prompt_token_ids)
            self.counts.num_cached_tokens += started.num_cached_tokens
