"""Execution and measurement of scheduled batches."""

from __future__ import annotations

from typing import NamedTuple

from .execution.execution import Execution
from .execution.prompt_reading import read_prompt
from .execution.runner import StepOutput
from .heartbeat import Heartbeat
from .next_tokens import NextTokens
from .parts import EngineParts
from .reports.statistics import Statistics
from .request_lifecycle import RequestLifecycle
from .scheduling.batch import Part, ScheduledBatch, parts_of


class StepExecutor:
    """Runs batches, and reports their cost to the scheduler, speculation and utilization."""

    def __init__(
        self, parts: EngineParts, requests: RequestLifecycle, statistics: Statistics
    ) -> None:
        self._clock = parts.clock
        self._runner = parts.runner
        self._arena = parts.tiers.arena
        self._scheduler = parts.scheduler
        self._speculation = parts.speculation
        self._cost = parts.cost
        self._cpu_threads = parts.cpu_threads
        self._utilization = parts.utilization
        self._statistics = statistics
        self._heartbeat: Heartbeat | None = None
        self._execution: Execution[StepOutput] = Execution(
            runner=parts.runner,
            scheduler=parts.scheduler,
            speculation=parts.speculation,
            read=read_prompt,
            draw=NextTokens(parts.speculation.acceptor, parts.grammars).draw,
            requests=requests,
        )

    def report_progress_to(self, heartbeat: Heartbeat) -> None:
        """Name each step's requests before it runs."""
        self._heartbeat = heartbeat

    def run(self, batch: ScheduledBatch) -> None:
        """Run one step and process its output."""
        start = self._clock()
        if start >= self._cpu_threads.due_at:
            self._cpu_threads.adjust(start)
        if batch.operations:
            self._runner.prepare_blocks(batch)
        prepared = self._clock()
        sequences = self._execution.current(batch.sequences)
        if not sequences:
            return
        parts = [sequences]
        if any(sequence.request.num_lone_steps for sequence in sequences):
            parts = list(parts_of(sequences))
        ran = []
        end = start
        for part in parts:
            ran.append(self._run_part(part, since=end))
            end = self._clock()
        self._statistics.step(len(sequences))
        if len(ran) > 1 or not ran[0].is_one_step:
            return  # several forwards: not the cost of one step
        computed = batch
        if batch.shape.num_draft_tokens:
            computed = batch.running(ran[0].sequences)
        if not computed.shape.num_prefill_tokens:
            self._speculation.observe_step(end - prepared)
        self._scheduler.observe(
            computed,
            end - start - ran[0].draft_seconds,
            swap_seconds=prepared - start,
        )

    def _run_part(self, sequences: Part, *, since: float) -> _Ran:
        """Run the sequences of one forward. `since`: when its measured time begins."""
        start = self._clock()
        if self._heartbeat:
            self._heartbeat.begin_step(sequence.request.request_id for sequence in sequences)
        if any(sequence.num_draft_tokens for sequence in sequences):
            sequences = self._speculation.draft(sequences)
        drafted = self._clock()
        leases = (sequence.request.lease for sequence in sequences)
        rows = {lease.row for lease in leases if lease is not None}
        adapter_bytes = sum(self._arena.row_bytes[row] for row in rows)
        work = self._cost.work(sequences, adapter_bytes=adapter_bytes)
        is_one_step = self._execution.run(sequences)
        self._utilization.add(work, self._clock() - since)
        return _Ran(sequences, is_one_step, drafted - start)


class _Ran(NamedTuple):
    """The outcome of one part of a step."""

    sequences: Part
    """With their drafts."""
    is_one_step: bool
    """Whether one forward was enough."""
    draft_seconds: float
