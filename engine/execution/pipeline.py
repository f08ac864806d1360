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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Generic

from ..errors import RankLost
from ..scheduling.batch import ScheduledSequence
from ..scheduling.scheduler import Scheduler
from .execution import Execution, LaunchedStep, OutputT

logger = logging.getLogger(__name__)


class StepsInFlight(ABC, Generic[OutputT]):
    """Steps that were launched and not read."""

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
        self._steps: deque[LaunchedStep[OutputT]] = deque()
        """In the order of their launches."""

    @property
    def is_empty(self) -> bool:
        """No step is in flight."""
        return not self._steps

    def takes(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether a step of these may be in flight while the next one is scheduled."""
        return not any(
            sequence.num_draft_tokens
            or sequence.request.unread
            or sequence.request.num_lone_steps
            or sequence.compacts
            for sequence in sequences
        )

    def read_if_needed(self) -> None:
        """Read the steps in flight if the next one cannot be scheduled before that."""
        if self._steps and not self._scheduler.can_plan_ahead:
            self.finish()

    def finish(self) -> None:
        """Read and process all steps in flight."""
        while self._steps:
            self.finish_first()

    def finish_first(self) -> None:
        """Read and process the first step in flight, if there is one."""
        if self._steps:
            self._finish(self._steps.popleft())

    @abstractmethod
    def run(self, sequences: tuple[ScheduledSequence, ...]) -> None:
        """Launch these sequences, which it `takes`, and read what must be read then.

        If the launch fails, the step runs and is read once more, apart if need be.
        """

    def _begin(self, sequences: tuple[ScheduledSequence, ...]) -> LaunchedStep[OutputT] | None:
        """Launch a step behind those in flight; None if that failed."""
        in_flight = (step.sequences for step in self._steps)
        self._on_launch(_ids(chain(*in_flight, sequences)))
        try:
            return self._launch(sequences)
        except RankLost:
            raise
        except Exception:  # it is tried again, which attributes the error
            logger.exception("launching a step of %d sequences failed", len(sequences))
            return None

    def _launch(self, sequences: tuple[ScheduledSequence, ...]) -> LaunchedStep[OutputT]:
        return self._execution.launch(sequences, self._steps[-1] if self._steps else None)

    def _finish(self, step: LaunchedStep[OutputT]) -> None:
        self._on_read(self._execution.finish(step))

    def _run_now(self, sequences: tuple[ScheduledSequence, ...]) -> None:
        if current := self._execution.current(sequences):
            self._execution.run(current)
        self._on_read(False)


class Pipeline(StepsInFlight[OutputT]):
    """Keeps the last launched step in flight, where it may."""

    def run(self, sequences: tuple[ScheduledSequence, ...]) -> None:
        """See `StepsInFlight.run`."""
        step = self._begin(sequences)
        self.finish()
        if step is None:
            self._run_now(sequences)
        elif self._execution.draw(step):
            self._steps.append(step)
        else:
            self._finish(step)


def _ids(sequences: Iterable[ScheduledSequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]
