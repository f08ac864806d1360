"""Device utilization: the bytes and operations of the steps, divided by the device's peak.

It counts only bytes and operations that no implementation can avoid: each weight once per step,
each visible key and value once per sequence, each adapter of the batch once, two operations per
weight and token. The operations of attention and LoRA are excluded; they are comparatively small
unless contexts are long. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...kernels.attention_window import AttentionWindow
from ..messages import UtilizationStats


class DevicePeak(NamedTuple):
    """The measured peak of this device."""

    bytes_per_second: float
    flops_per_second: float


class StepWork(NamedTuple):
    """The bytes and operations of a step."""

    num_bytes: float
    num_flops: float


class KvReads(NamedTuple):
    """Layers that see equally far back."""

    bytes_per_token: int
    window: AttentionWindow | None = None
    """The positions that a query sees; None: all."""
    sinks: int = 0


class Span(Protocol):
    """Adjacent tokens of one sequence in a step."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_logits_rows(self) -> int:
        """Its last rows, that have logits."""

    @property
    def context_len(self) -> int:
        """Tokens in the cache once the step has run."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The parts of a model that differ in how often a step reads and multiplies them."""

    shared_bytes: int
    """Read whole in every step: all but experts and tables of embeddings."""
    shared_parameters: int
    """Multiplied for every token."""
    head_parameters: int
    """Multiplied for every row that has logits."""
    kv_reads: tuple[KvReads, ...]
    expert_bytes: int = 0
    expert_parameters: int = 0
    expert_share: float = 0.0
    """The part of the experts to which one token is routed."""

    def work(self, spans: Iterable[Span], *, adapter_bytes: int = 0) -> StepWork:
        """The work of a step over `spans`; `adapter_bytes`: its distinct adapters together."""
        num_logits_rows = num_tokens = kv_bytes = 0
        for span in spans:
            num_logits_rows += span.num_logits_rows
            num_tokens += span.num_tokens
            context_len = span.context_len
            for bytes_per_token, window, sinks in self.kv_reads:
                num_read = context_len if window is None else min(context_len, window.size + sinks)
                kv_bytes += (num_read + span.num_tokens) * bytes_per_token
        # For independently routed tokens: the expected part of the experts that any of them uses.
        expert_share = 1 - (1 - self.expert_share) ** num_tokens
        weight_bytes = self.shared_bytes + expert_share * self.expert_bytes
        per_token = self.shared_parameters + self.expert_share * self.expert_parameters
        return StepWork(
            num_bytes=weight_bytes + kv_bytes + adapter_bytes,
            num_flops=2 * (per_token * num_tokens + self.head_parameters * num_logits_rows),
        )


class Utilization:
    """Adds up the steps' work against the time they took."""

    def __init__(self, peak: DevicePeak, clock: Callable[[], float] = time.monotonic) -> None:
        self.peak = peak
        self._clock = clock
        self._reported_at = clock()
        self._work = StepWork(0.0, 0.0)
        self._seconds = 0.0
        self._reported = (self._work, self._seconds)

    def add(self, work: StepWork, seconds: float) -> None:
        """A step has done `work` in `seconds`."""
        self._work = StepWork(
            self._work.num_bytes + work.num_bytes, self._work.num_flops + work.num_flops
        )
        self._seconds += seconds

    def snapshot(self) -> UtilizationStats:
        """The totals, and the utilization since the last snapshot: 0 if no step has run."""
        before, seconds_before = self._reported
        self._reported = (self._work, self._seconds)
        now = self._clock()
        elapsed, self._reported_at = now - self._reported_at, now
        seconds = self._seconds - seconds_before
        memory = (self._work.num_bytes - before.num_bytes) / self.peak.bytes_per_second
        compute = (self._work.num_flops - before.num_flops) / self.peak.flops_per_second
        return UtilizationStats(
            step_seconds=self._seconds,
            num_bytes=self._work.num_bytes,
            num_flops=self._work.num_flops,
            memory=memory / seconds if seconds else 0.0,
            compute=compute / seconds if seconds else 0.0,
            busy=min(seconds / elapsed, 1.0) if elapsed > 0 else 0.0,
            peak_bytes_per_second=self.peak.bytes_per_second,
            peak_flops_per_second=self.peak.flops_per_second,
        )
