"""Prompt reading in place of `execution.prompt_reading`: each result is delivered once."""

from __future__ import annotations

from collections import Counter, defaultdict

from loraplex.engine.execution.execution import StepRows
from loraplex.engine.messages import Pooling
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledSequence

from .contents import Contents
from .forward import Rows
from .violation import Invariant, require


class Readings:
    """Takes the rows that the loop reads, and compares them with the prompt's own."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Positions."""
        self._read: defaultdict[str, list[int]] = defaultdict(list)
        """By request id, the positions read so far."""

    def read(self, sequence: ScheduledSequence, output: Rows, rows: StepRows) -> None:
        request, read = sequence.request, sequence.read
        if request.reads_logits:
            found = [output.values[row] for row in rows.kept[: len(read)]]
        else:
            first = read.start - sequence.start
            found = [output.token_states[row] for row in rows.computed[first : first + len(read)]]
        values = Contents(request.namespace).up_to(request.token_ids, read.stop)
        expected = values[read.start : read.stop]
        require(found == expected, Invariant.READ_ONCE, f"{request.request_id} reads {found}")
        self._read[request.request_id] += read
        self.counts["reads"] += len(read)
        self.counts["reads_preempted"] += len(read) if request.num_preemptions else 0

    def settle(self, request: Request, reason: str) -> None:
        """A request has ended: if well, with all that it asked for."""
        read = self._read.pop(request.request_id, [])
        if reason in ("length", "stop"):
            expected = list(_asked(request))
            require(read == expected, Invariant.READ_ONCE, f"{read} of {expected} are read")


def _asked(request: Request) -> range:
    length = request.num_prompt_tokens
    if request.submitted.num_prompt_logprobs is not None:
        return range(length - 1)
    first = {Pooling.MEAN: 0, Pooling.LAST: length - 1, None: length}[request.submitted.pooling]
    return range(first, length)
