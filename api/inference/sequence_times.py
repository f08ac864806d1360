"""Records the token times of one sequence in the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...engine.messages import LatencyTargets
from ...platform.overview.figures import MET, FigureSums
from ..telemetry.metrics import Metrics

ABORTED = "aborted"
FAILED = "error"
"""Finish reasons of sequences that are not whole."""


class SequenceTimes:
    """The clock of one sequence, running since its request's arrival."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        arrived_at: float,
        figures: Callable[[], FigureSums] = FigureSums,
        targets: LatencyTargets | None = None,
        targets_set_by: str = "server",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`figures`: the tenant's figures, to which tokens are added as they arrive, and the result
        at the end. `targets`: its service level objective; None or empty: none. `targets_set_by`:
        as in `Objective`."""
        self._metrics = metrics.sequences
        self._objective = metrics.objective
        self._targets = targets
        self._targets_set_by = targets_set_by
        self._figures = figures
        self._arrived_at = arrived_at
        self._clock = clock
        self._num_tokens = 0
        self._is_ended = False
        self._first_at = self._last_at = 0.0
        self.first_token_seconds: float | None = None

    def tokens_came(self, num_tokens: int) -> None:
        now, figures = self._clock(), self._figures()
        figures.output_tokens += num_tokens
        if self._num_tokens:
            gap = now - self._last_at
            self._metrics.token_gap_seconds.observe(gap)
            figures.tokens_came_again(gap)
        else:
            self._first_at = now
            self.first_token_seconds = now - self._arrived_at
            self._metrics.first_token_seconds.observe(self.first_token_seconds)
            figures.first_token_came(self.first_token_seconds)
        self._last_at = now
        self._num_tokens += num_tokens

    def ended(self, finish_reason: str) -> None:
        """Record the finish reason; later calls are ignored."""
        if self._is_ended:
            return
        self._is_ended = True
        self._metrics.finished.labels(finish_reason).inc()
        if finish_reason in (ABORTED, FAILED):
            return
        self._metrics.end_to_end_seconds.observe(self._clock() - self._arrived_at)
        mean_gap = self.output_token_seconds
        if mean_gap is not None:
            self._metrics.output_token_seconds.observe(mean_gap)
        if self._targets and self.first_token_seconds is not None:
            missed = self._targets.missed(self.first_token_seconds, mean_gap or 0.0)
            self._judge(missed or MET)

    def was_refused(self) -> None:
        """The engine had no room for it in time."""
        self._judge("refused")

    def was_failed(self) -> None:
        """The server failed to answer it."""
        self._judge("failed")

    def _judge(self, result: str) -> None:
        if self._targets:
            self._objective.note(result, self._targets_set_by)
            self._figures().objective_judged(self._targets_set_by, result)

    @property
    def output_token_seconds(self) -> float | None:
        """TPOT: the mean time per token after the first; None if there was no second."""
        if self._num_tokens < 2:
            return None
        return (self._last_at - self._first_at) / (self._num_tokens - 1)
