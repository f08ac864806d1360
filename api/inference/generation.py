"""One caller's generation: several engine sequences as one stream of text.

A sequence is one choice for one prompt. `Generation` owns the engine requests. Its creator must
`aclose` it, whether it was started or not; this aborts running sequences and charges them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ...adapters.manager import Tier
from ...engine.errors import Overloaded, TenantQueueFull
from ...engine.messages import GenerationRequest, PromptOutput, RequestStarted, TokensGenerated
from ...engine.process.engine import Engine
from ...engine.process.request_end import RequestEnd
from ...engine.process.request_stream import RequestEvent, RequestStream
from ...engine.text.text_form import TextForm
from ...engine.text.tokenizer import Tokenizer
from ...engine.token_journal import SlotCounter
from ...platform.overview.figures import FigureSums
from ..contract.errors import ApiError, as_api_error
from ..telemetry.metrics import Metrics
from ..telemetry.request_measures import RequestMeasures
from ..tools.reasoning import Reasoning
from .answer_opening import AnswerOpening
from .arrivals import Arrivals
from .sequence_text import Delta, SequenceText
from .sequence_times import ABORTED, FAILED, SequenceTimes

MAX_OPEN_SEQUENCES = 64
"""Maximum sequences of one HTTP request in the engine at once; embeddings may have more in
total."""
REFUSALS = (Overloaded.code, TenantQueueFull.code)
"""The codes of an engine without room for a request in time."""


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to generate, and how its tokens are converted to text."""

    index: int
    """The `index` of its choice."""
    request: GenerationRequest
    counter: SlotCounter
    """Counts its tokens, so that a crash leaves none uncharged."""
    is_first_choice: bool
    """Whether it accounts for its prompt; further choices of the same prompt do not."""
    text: TextForm
    reasoning: Reasoning | None = None
    """What its text may begin with."""
    targets_set_by: str = "server"
    """As in `Objective`."""


@dataclass(slots=True)
class TokenCounts:
    """The tokens of a generation so far."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_draft_tokens: int = 0
    """Draft tokens for the answer."""
    num_accepted_tokens: int = 0
    """Accepted draft tokens in the answer."""
    num_reasoning_tokens: int = 0
    """Completion tokens of the reasoning of the sequences that have ended."""

    def add_output(self, num_tokens: int, num_draft_tokens: int) -> None:
        """Add the tokens of one step that belong to the answer; the last of them is not a draft
        token."""
        self.num_completion_tokens += num_tokens
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_tokens - 1


class Outcome(NamedTuple):
    """The metered result of a generation."""

    counts: TokenCounts
    """The tokens of the answer; an incomplete answer is charged by the journal's counts."""
    tier: Tier | None
    """The adapter's tier at arrival."""
    finish_reason: str
    """That of the sequence that ended last; `aborted` if the answer is incomplete."""
    load_ms: float | None = None
    """The duration of the load that the request waited for."""
    ends: Sequence[RequestEnd] = ()
    """Those of its sequences: they say what these have used."""


@dataclass(slots=True)
class _OpenSequence:
    """A sequence that was submitted to the engine and has not ended."""

    spec: SequenceSpec
    text: SequenceText
    times: SequenceTimes
    stream: RequestStream | None = None
    """None while it is being submitted."""


def _leave(_: Delta) -> bool:
    return False


class Generation:
    """Runs the sequences of one HTTP request."""

    def __init__(
        self,
        sequences: Sequence[SequenceSpec],
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: Metrics,
        arrived_at: float,
        measures: RequestMeasures,
        meter: Callable[[Outcome], Awaitable[None]],
        figures: Callable[[], FigureSums] = FigureSums,
        deadline_at: float | None = None,
        record: list[str] | None = None,
    ) -> None:
        """`meter` is called exactly once at the end, before the last delta is returned. `figures`:
        the tenant's current figures. `arrived_at` and `deadline_at` are on the monotonic clock.
        `record` gets the texts of the first choice."""
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
        """Sequences that are not submitted to the engine yet."""
        self._open: dict[int, _OpenSequence] = {}
        """By the index of the choice."""
        self._ends: list[RequestEnd] = []
        self._arrivals = Arrivals()
        self._is_metered = False
        self._finish_reason = ABORTED
        """That of the sequence that ended last."""
        self._tier: Tier | None = None
        self._load_ms: float | None = None
        self._record = record
        self._opening = None if measures.arm is None else AnswerOpening()
        """Of the first choice, if the version is compared with another."""

    async def start(
        self, *, is_loading: Callable[[], bool], patience_seconds: float
    ) -> RequestStarted:
        """Submit everything; return once the first sequence is scheduled.

        Raises ApiError or an EngineError: the engine's refusal, or `adapter_loading` if the wait
        time is over and `is_loading` reports that the adapter is missing.
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
        """All text as it arrives: each time the deltas since the last. It is metered before the
        last deltas are returned. Raises ApiError, an EngineError, or an error of `take`.

        While this iteration waits, `take` is called with each delta that does not end its choice.
        If it returns True, the delta is consumed and the task is not woken.
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
        """All deltas of each choice, once everything has arrived and is metered. Raises ApiError or
        an EngineError."""
        by_choice = await self._arrivals.all()
        await self._meter_once(self._finish_reason)
        return [by_choice[spec.index] for spec in self._sequences]

    def cancel(self) -> None:
        """End it on behalf of another caller; its own caller gets `request_cancelled`."""
        self._arrivals.fail(ApiError("request_cancelled"))

    async def aclose(self) -> None:
        """Abort running sequences and meter them. Idempotent."""
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
            await self._meter(
                Outcome(self.counts, self._tier, finish_reason, self._load_ms, self._ends)
            )

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
                form=spec.text,
                reasoning=spec.reasoning,
            ),
            SequenceTimes(
                self._metrics,
                arrived_at=self._arrived_at,
                figures=self._figures,
                targets=spec.request.targets if spec.request.has_ttft_target else None,
                targets_set_by=spec.targets_set_by,
            ),
        )
        self._open[spec.index] = sequence
        try:
            sequence.stream = self._engine.submit(
                self._due(spec.request), partial(self._take, sequence), spec.counter
            )
            self._ends.append(sequence.stream.end)
        except Exception as exc:  # any error ends the sequence, so that the request ends too
            self._fail(sequence, exc)

    def _due(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the remaining time of the deadline."""
        if self._deadline_at is None:
            return request
        return replace(request, deadline_seconds=max(0.0, self._deadline_at - time.monotonic()))

    def _take(self, sequence: _OpenSequence, event: RequestEvent) -> None:
        """Process an event of the engine immediately, so that a stop string ends its sequence even
        if the client does not read."""
        try:
            delta = self._read(sequence, event)
            if delta is not None:
                self._arrivals.add(delta)
                if self._record is not None and sequence.spec.index == 0:
                    self._record.append(delta.text)
                if self._opening is not None and sequence.spec.index == 0:
                    self._watch(self._opening, sequence, delta)
                if delta.finish_reason is not None:
                    self._end_well(sequence, delta.finish_reason)
        except Exception as exc:  # it must not end the engine's client, which serves other requests
            self._fail(sequence, exc)

    def _watch(self, opening: AnswerOpening, sequence: _OpenSequence, delta: Delta) -> None:
        if sequence.text.is_in_answer:
            opening.add(delta.text)
        if delta.finish_reason is not None and sequence.spec.request.pooling is None:
            self._measures.is_refusal = opening.is_refusal(delta.finish_reason)
            self._measures.token_seconds = sequence.times.output_token_seconds

    def _end_well(self, sequence: _OpenSequence, finish_reason: str) -> None:
        self._finish_reason = finish_reason
        self.counts.num_reasoning_tokens += sequence.text.num_reasoning_tokens
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
        if isinstance(event, PromptOutput):
            return sequence.text.read(event)
        return sequence.text.finish(event)

    def _fail(self, sequence: _OpenSequence, exc: Exception) -> None:
        self._waiting.clear()
        error = as_api_error(exc)
        if error.code in REFUSALS:
            sequence.times.was_refused()
        elif error.published.status >= 500:  # no caller's mistake
            sequence.times.was_failed()
        self._end(sequence, FAILED)
        self._arrivals.fail(exc)

    def _end(self, sequence: _OpenSequence, finish_reason: str) -> None:
        """Abort the sequence. Idempotent."""
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
