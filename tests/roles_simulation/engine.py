"""A simulated engine that exports prefixes and waits for them.

What the engine's core and `RequestLifecycle` do around them is repeated here in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.errors import EngineError
from loraplex.engine.handover.prefix_handover import PIECE_BYTES, PrefixHandover
from loraplex.engine.messages import (
    AdapterEvicted,
    ErrorInfo,
    FinishReason,
    FromAgent,
    GenerationRequest,
    PrefixPiece,
    RequestFinished,
    StepEvents,
    TokensGenerated,
)
from loraplex.engine.request import Request
from simulation.engine import SimulatedEngine
from simulation.forward import NO_FAULTS
from simulation.scenario import Scenario

from .pages import SimulatedPages

BLOCKS_PER_PIECE = 1


class ReplicaEngine(SimulatedEngine):
    """The engine of one replica; `messages` are those of its last step."""

    def __init__(
        self, scenario: Scenario, *, clock: Callable[[], float], want: Callable[[AdapterKey], None]
    ) -> None:
        super().__init__(
            scenario,
            clock=clock,
            want=want,
            on_batch=lambda batch: None,
            on_end=self._note_end,
            disk=None,
        )
        num_groups = len(scenario.groups)
        pages: Any = SimulatedPages(self.device, scenario.limits.block_size)
        block_bytes = [PIECE_BYTES // BLOCKS_PER_PIECE // num_groups] * num_groups
        self.handover = PrefixHandover(self.kv, pages, block_bytes, clock, is_divided=False)
        self.awaiting: set[str] = set()
        """The requests that wait for a prefix."""
        self.handed: Counter[str] = Counter()
        self._events = StepEvents()

    def take(self, submitted: GenerationRequest) -> None:
        """Queue a request. One that is refused ends with the error."""
        try:
            self.submit(submitted, is_held=submitted.awaits_prefix)
        except EngineError as error:
            self._events.finished.append(refusal_of(submitted, error))
            return
        if submitted.awaits_prefix:
            self.awaiting.add(submitted.request_id)

    def take_prefix(self, piece: PrefixPiece) -> None:
        if piece.request_id not in self.awaiting:
            self.handed["late_pieces"] += 1
            return
        request = self.scheduler.get(piece.request_id)
        assert request is not None, "what has ended waits no longer"
        num_stored = self._num_stored
        self.handover.store(request, piece)
        self.handed["stored_blocks"] += self._num_stored - num_stored
        self.handed["pieces"] += 1
        if piece.is_last:
            self.awaiting.remove(piece.request_id)
            request.prefix_wait_seconds = self._clock() - request.arrival_time
            self.scheduler.release(request)

    def evict(self, key: AdapterKey, drain_seconds: float = 0.0) -> None:
        self.handover.forget(key)
        super().evict(key, drain_seconds)

    def generate(self, request: Request, generated: TokensGenerated) -> None:
        super().generate(request, generated)
        self._events.tokens.append(generated)

    def run_step(self) -> Iterator[FromAgent]:
        """One step; what it says, in order."""
        self.step(NO_FAULTS)
        self._events.started.extend(self.schedule.started)
        for key, receipt in self.evicted:
            yield AdapterEvicted(key, receipt)
        events, self._events = self._events, StepEvents()
        if events.started or events.tokens or events.finished:
            yield events
        if self.handover.pieces:
            yield self.handover.take_piece()

    def close(self) -> None:
        """Its process has ended."""
        self.handover.close()

    @property
    def _num_stored(self) -> int:
        return sum(group.host.num_stored for group in self.kv.groups)

    def _note_end(self, request: Request, reason: str) -> None:
        if request.submitted.exports_prefix and reason == FinishReason.LENGTH.value:
            self.handover.export(request, is_deleted=request.adapter in self.drains)
        self.awaiting.discard(request.request_id)
        self._events.finished.append(self._end_of(request, reason))

    def _end_of(self, request: Request, reason: str) -> RequestFinished:
        has_failed = reason not in list(FinishReason)
        return RequestFinished(
            request_id=request.request_id,
            reason=FinishReason.ERROR if has_failed else FinishReason(reason),
            num_prompt_tokens=request.num_prompt_tokens,
            num_generated_tokens=request.num_generated_tokens,
            error=ErrorInfo(reason, reason) if has_failed else None,
        )


def refusal_of(submitted: GenerationRequest, error: EngineError) -> RequestFinished:
    return RequestFinished(
        request_id=submitted.request_id,
        reason=FinishReason.ERROR,
        num_prompt_tokens=len(submitted.prompt_token_ids),
        num_generated_tokens=0,
        error=ErrorInfo(error.code, str(error), error.retry_after_seconds),
    )
