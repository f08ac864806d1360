"""Runs steps so that the device does not wait for the host: asynchronous scheduling.

While the device computes a step, the host schedules and launches the next one. It does not know the
tokens that the first step samples: they stay on the device, where the next step takes them as its
input. Only then does the host read them, and process them while the device computes the next step.

    host   | schedule 1, launch 1, draw 1 | schedule 2, launch 2 | read 1, draw 2 | schedule 3 ...
    device                | step 1 ............................ | step 2 ......................

At most one step is in flight while another is scheduled. Two are in flight between a launch and the
read that follows it. If a request ends in the first of the two, the second computes it once more,
and that result is dropped. Its blocks are free at once, because the device executes everything in
order. Its adapter's lease ends when the second step is read, because adapters are copied outside
that order. A step is drawn after the one before it was read, so all tokens before its own are
known: grammars, penalties and log-probabilities need no exception.

Steps that verify draft tokens, read prompts, compact a cache or run suspects apart begin after the
one before was read, and are read before the next is scheduled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic

from ..scheduling.batch import ScheduledSequence
from ..scheduling.scheduler import Scheduler
from .execution import Execution, LaunchedStep, OutputT

logger = logging.getLogger(__name__)


class Pipeline(Generic[OutputT]):
    """Keeps the last launched step in flight, where it may."""

    def __init__(
        self,
        execution: Execution[OutputT],
        scheduler: Scheduler,
        *,
        on_launch: Callable[[Sequence[str]], None],
        on_read: Callable[[bool], None],
    ) -> None:
        """on_launch: called before each launch with the ids of all requests that are in flight
        then. on_read: called after each step was read and processed; False: parts of it were run
        again."""
        self._execution = execution
        self._scheduler = scheduler
        self._on_launch = on_launch
        self._on_read = on_read
        self._step: LaunchedStep[OutputT] | None = None

    @property
    def is_empty(self) -> bool:
        """No step is in flight."""
        return self._step is None

    def read_if_needed(self) -> None:
        """Read the step in flight if the next one cannot be scheduled before that."""
        if self._step is not None and not self._scheduler.can_plan_ahead:
            self.finish()

    def finish(self) -> None:
        """Read and process the step in flight, if there is one."""
        if self._step is not None:
            step, self._step = self._step, None
            self._finish(step)

    def run(self, sequences: tuple[ScheduledSequence, ...]) -> None:
        """Launch these sequences, which `may_stay_in_flight`, and read the step before them.

        If the launch fails, the step runs and is read once more, apart if need be.
        """
        before, self._step = self._step, None
        self._on_launch([*_ids(before.sequences if before else ()), *_ids(sequences)])
        try:
            step = self._execution.launch(sequences, before)
        except Exception:  # it is tried again below, which attributes the error
            logger.exception("launching a step of %d sequences failed", len(sequences))
            step = None
        if before is not None:
            self._finish(before)
        if step is None:
            self._run_now(sequences)
            return
        if self._execution.draw(step):
            self._step = step
        else:
            self._finish(step)

    def _finish(self, step: LaunchedStep[OutputT]) -> None:
        self._on_read(self._execution.finish(step))

    def _run_now(self, sequences: tuple[ScheduledSequence, ...]) -> None:
        if current := self._execution.current(sequences):
            self._execution.run(current)
        self._on_read(False)


def may_stay_in_flight(sequences: Sequence[ScheduledSequence]) -> bool:
    """Whether a step of these may be in flight while the next one is scheduled."""
    return not any(
        sequence.num_draft_tokens
        or sequence.request.unread
        or sequence.request.num_lone_steps
        or sequence.compacts
        for sequence in sequences
    )


def _ids(sequences: Sequence[ScheduledSequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]
