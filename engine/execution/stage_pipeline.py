"""Runs steps so that every stage of a pipeline has work.

A step passes the stages one after the other. While one computes it, the stages before have others:
as many steps are in flight as there are stages.

    first stage   | step 1 | step 2 | step 3 ...
    last stage             | step 1 | step 2 | step 3 ...

A request is in one step at a time, because its next token is known only when its step was read. The
chunks of a prompt follow each other without waiting. So a step has a part of the sequences, and all
stages together compute as many tokens in the time of one step as one process that has all layers
would compute in the time of all.

Steps that verify draft tokens, read prompts, observe attention or run suspects apart begin after
those before were read, and are read before the next is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..scheduling.batch import ScheduledSequence
from ..scheduling.scheduler import Scheduler
from .execution import Execution, LaunchedStep, OutputT
from .pipeline import StepsInFlight

Begin = Callable[[tuple[ScheduledSequence, ...]], Callable[[], OutputT]]
"""Lets other stages begin with a step; the result computes what is left of it here, in the order of
the launches."""


class StagePipeline(StepsInFlight[OutputT]):
    """Keeps a step in flight for each stage."""

    def __init__(
        self,
        execution: Execution[OutputT],
        scheduler: Scheduler,
        *,
        num_stages: int,
        begin: Begin[OutputT],
        on_launch: Callable[[Sequence[str]], None],
        on_read: Callable[[bool], None],
    ) -> None:
        """`begin`: lets the stages before this one begin with a step. See `StepsInFlight`."""
        super().__init__(execution, scheduler, on_launch=on_launch, on_read=on_read)
        self._num_stages = num_stages
        self._begin_stages = begin

    def takes(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """See `StepsInFlight.takes`. What was observed of a request's attention must be known
        before its next step begins."""
        is_observed = any(sequence.request.kv.eviction is not None for sequence in sequences)
        return super().takes(sequences) and not is_observed

    def run(self, sequences: tuple[ScheduledSequence, ...]) -> None:
        """See `StepsInFlight.run`."""
        step = self._begin(sequences)
        if step is None:
            self.finish()
            self._run_now(sequences)
            return
        self._steps.append(step)
        if len(self._steps) == self._num_stages:
            self.finish_first()

    def _launch(self, sequences: tuple[ScheduledSequence, ...]) -> LaunchedStep[OutputT]:
        compute = self._begin_stages(sequences)
        self._scheduler.note_launch(sequences)
        return LaunchedStep(sequences, None, compute=compute)
