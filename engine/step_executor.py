"""Execution and measurement of scheduled batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from .execution.execution import Execution
from .execution.pipeline import Pipeline, StepsInFlight
from .execution.prompt_reading import read_prompt
from .execution.runner import StepOutput
from .execution.stage_pipeline import StagePipeline
from .heartbeat import Heartbeat
from .memory.utilization import StepWork
from .next_tokens import NextTokens
from .parts import EngineParts
from .ranks.leader_runner import LeaderRunner
from .reports.statistics import Statistics
from .request_lifecycle import RequestLifecycle
from .scheduling.batch import Part, ScheduledBatch, parts_of


class StepExecutor:
    """Runs batches, charges their seconds to their requests, and reports their cost to the
    scheduler, speculation and utilization."""

    def __init__(
        self, parts: EngineParts, requests: RequestLifecycle, statistics: Statistics
    ) -> None:
        self._clock = parts.clock
        self._runner = parts.runner
        self._kv = parts.kv
        self._arena = parts.tiers.arena
        self._scheduler = parts.scheduler
        self._speculation = parts.speculation
        self._cost = parts.cost
        self._costs = parts.costs
        self._cpu_threads = parts.cpu_threads
        self._utilization = parts.utilization
        self._statistics = statistics
        self._heartbeat: Heartbeat | None = None
        self._execution: Execution[StepOutput] = Execution(
            runner=parts.runner,
            scheduler=parts.scheduler,
            speculation=parts.speculation,
            read=partial(read_prompt, self._arena),
            draw=NextTokens(parts.speculation.acceptor, parts.grammars).draw,
            requests=requests,
        )
        self._pipeline = self._open_pipeline(parts)
        """None: each step is read before the next one is scheduled."""
        self._launched: deque[_Launched] = deque()
        """The steps that the pipeline has not read, the first first."""
        self._last_read_time = 0.0

    def _open_pipeline(self, parts: EngineParts) -> StepsInFlight[StepOutput] | None:
        if isinstance(parts.runner, LeaderRunner) and parts.config.pipeline_parallel_size > 1:
            return StagePipeline(
                self._execution,
                parts.scheduler,
                num_stages=parts.config.pipeline_parallel_size,
                begin=parts.runner.begin,
                on_launch=self._begin_step,
                on_read=self._note_read,
            )
        if not parts.is_async:
            return None
        return Pipeline(
            self._execution,
            parts.scheduler,
            on_launch=self._begin_step,
            on_read=self._note_read,
        )

    def report_progress_to(self, heartbeat: Heartbeat) -> None:
        """Name each step's requests before it runs."""
        self._heartbeat = heartbeat

    @property
    def has_step_in_flight(self) -> bool:
        return self._pipeline is not None and not self._pipeline.is_empty

    def read_if_needed(self) -> None:
        """See `StepsInFlight.read_if_needed`."""
        if self._pipeline:
            self._pipeline.read_if_needed()

    def finish_first(self) -> None:
        """Read and process the first step in flight, if there is one."""
        if self._pipeline:
            self._pipeline.finish_first()

    def rest(self) -> None:
        """There is no step to run: erase what deleted adapters have left in the KV cache, and write
        prefixes to the disk. So are operations executed that wait for a step already."""
        if not self.has_step_in_flight:
            self._runner.execute_at_rest(self._kv.operations.take())

    def run(self, batch: ScheduledBatch) -> None:
        """Run one step and process its output; if it stays in flight, that of the one before."""
        start = self._clock()
        if start >= self._cpu_threads.due_at:
            self._cpu_threads.adjust(start)
        if batch.operations:
            self._runner.prepare_blocks(batch)
        prepared = self._clock()
        sequences = self._execution.current(batch.sequences)
        if self._pipeline:
            if sequences and self._pipeline.takes(sequences):
                self._launched.append(
                    _Launched(batch, self._work(sequences), sequences, start, prepared - start)
                )
                self._pipeline.run(sequences)
                return
            self._pipeline.finish()
            sequences = self._execution.current(sequences)
            waited = self._clock() - prepared
            start, prepared = start + waited, prepared + waited
        if sequences:
            self._run_now(batch, sequences, start, prepared)

    def _note_read(self, is_one_step: bool) -> None:
        """A step that was in flight has cost the time since the one before it was read."""
        batch, work, sequences, start, swap_seconds = self._launched.popleft()
        end = self._clock()
        seconds = end - max(start, self._last_read_time)
        self._last_read_time = end
        self._utilization.add(work, seconds)
        self._costs.charge(sequences, seconds)
        self._statistics.step(len(sequences))
        if is_one_step:
            self._scheduler.observe(batch, seconds, swap_seconds)

    def _run_now(
        self, batch: ScheduledBatch, sequences: Part, start: float, prepared: float
    ) -> None:
        """Run a step, or its parts, and process the output."""
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
            self._heartbeat.begin_step([sequence.request.request_id for sequence in sequences])
        if any(sequence.num_draft_tokens for sequence in sequences):
            sequences = self._speculation.draft(sequences)
        drafted = self._clock()
        work = self._work(sequences)
        is_one_step = self._execution.run(sequences)
        seconds = self._clock() - since
        self._utilization.add(work, seconds)
        self._costs.charge(sequences, seconds)
        return _Ran(sequences, is_one_step, drafted - start)

    def _begin_step(self, request_ids: Sequence[str]) -> None:
        """Name the requests that are suspects if the engine crashes from now on."""
        if self._heartbeat:
            self._heartbeat.begin_step(request_ids)

    def _work(self, sequences: Part) -> StepWork:
        rows = {sequence.lease.row for sequence in sequences if sequence.lease is not None}
        adapter_bytes = sum(self._arena.row_bytes[row] for row in rows)
        return self._cost.work(sequences, adapter_bytes=adapter_bytes)


class _Launched(NamedTuple):
    """A step that is in flight."""

    batch: ScheduledBatch
    work: StepWork
    sequences: Part
    start: float
    """When its time began, unless another step was in flight."""
    swap_seconds: float


class _Ran(NamedTuple):
    """The outcome of one part of a step."""

    sequences: Part
    """With their drafts."""
    is_one_step: bool
    """Whether one forward was enough."""
    draft_seconds: float
