"""One step in the making: what the scheduler has decided so far. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .batch import ScheduledBatch, ScheduledSequence
from .errors import EngineError
from .kv_layout import KvOperation
from .messages import RequestStarted
from .request import Request
from .step_costs import StepShape


class Step:
    def __init__(self, *, budget: int, block_size: int) -> None:
        self.budget = budget
        """Tokens that may still be added."""
        self.started: list[RequestStarted] = []
        self.failed: list[tuple[Request, EngineError]] = []
        self.preempted: set[Request] = set()
        self.is_short = False
        """Whether what runs had to give blocks back: then nobody is admitted."""
        self._block_size = block_size
        self._decodes: dict[Request, ScheduledSequence] = {}
        self._prefills: dict[Request, ScheduledSequence] = {}

    def add(self, request: Request, num_tokens: int) -> None:
        sequences = self._decodes if num_tokens == 1 else self._prefills
        sequences[request] = ScheduledSequence(request, num_tokens)
        self.budget -= num_tokens

    def add_decode(self, request: Request) -> None:
        self._decodes[request] = ScheduledSequence(request, 1)
        self.budget -= 1

    def cancel(self, request: Request) -> None:
        """The request was preempted."""
        self.preempted.add(request)
        sequence = self._decodes.pop(request, None) or self._prefills.pop(request, None)
        if sequence:
            self.budget += sequence.num_tokens

    def shape(self) -> StepShape:
        return StepShape(
            num_prefill_tokens=sum(sequence.num_tokens for sequence in self._prefills.values()),
            num_decodes=len(self._decodes),
            num_context_tokens=sum(request.num_computed_tokens for request in self._decodes)
            + sum(request.num_computed_tokens for request in self._prefills),
        )

    def batch(self, take_operations: Callable[[], Sequence[KvOperation]]) -> ScheduledBatch | None:
        """None if nothing runs: what is to be done to the cache then waits for the next step."""
        if not self._decodes and not self._prefills:
            return None
        size = self._block_size
        # Sequences of one padding class (`block_pool.padding_class`) stand together.
        decodes = sorted(
            self._decodes.values(),
            key=lambda sequence: (sequence[0].num_computed_tokens // size).bit_length(),
        )
        prefills = sorted(self._prefills.values(), key=_arena_row)
        return ScheduledBatch((*decodes, *prefills), tuple(take_operations()), self.shape())


def _arena_row(sequence: ScheduledSequence) -> int:
    lease = sequence.request.lease
    return lease.row if lease else -1
