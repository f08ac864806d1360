"""One step in the making: what the scheduler has decided so far. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

from ..errors import EngineError
from ..kv.layout import KvOperation
from ..messages import RequestStarted
from ..request import Request
from .batch import ScheduledBatch, ScheduledSequence
from .step_costs import StepShape


class Step:
    def __init__(self, *, budget: int, block_size: int, max_read_rows: int) -> None:
        self.decodes: dict[Request, ScheduledSequence] = {}
        """Added to directly, by `Scheduler`: it is the hot loop."""
        self.started: list[RequestStarted] = []
        self.failed: list[tuple[Request, EngineError]] = []
        self.preempted: set[Request] = set()
        self.is_short = False
        """Whether what runs had to give blocks back: then nobody is admitted."""
        self._block_size = block_size
        self._prefills: dict[Request, ScheduledSequence] = {}
        self._limit = budget
        self._num_free_rows = max_read_rows
        self._num_prefill_tokens = 0
        self._num_draft_tokens = 0

    @property
    def budget(self) -> int:
        """Tokens that may still be added."""
        return self._limit - len(self.decodes) - self._num_draft_tokens - self._num_prefill_tokens

    def leave_at_most(self, num_tokens: int) -> None:
        """Let no more than so many tokens be added from now on."""
        self._limit -= max(self.budget - num_tokens, 0)

    def room_for(self, request: Request) -> int:
        """How many of the request's known tokens may be added; 0: none in this step."""
        num_tokens = min(request.num_remaining_tokens, self.budget)
        if not (request.reads_logits and request.unread):
            return num_tokens
        if not self._num_free_rows:
            return 0
        num_unkept = request.unread.start - request.num_computed_tokens
        return min(num_tokens, num_unkept + self._num_free_rows)

    def add(self, request: Request, num_tokens: int) -> None:
        sequence = ScheduledSequence(request, num_tokens)
        if request.reads_logits:
            self._num_free_rows -= len(sequence.read)
        if num_tokens == 1:
            self.decodes[request] = sequence
        else:
            self._prefills[request] = sequence
            self._num_prefill_tokens += num_tokens

    def draft_token(self, request: Request, num_tokens: int) -> None:
        """Let a decoding request verify so many draft tokens as well, and no others."""
        self._num_draft_tokens += num_tokens - self.decodes[request].num_draft_tokens
        self.decodes[request] = ScheduledSequence(request, 1 + num_tokens, num_tokens)

    def drafting(self) -> list[ScheduledSequence]:
        """Those that verify draft tokens."""
        if not self._num_draft_tokens:
            return []
        return [sequence for sequence in self.decodes.values() if sequence.num_draft_tokens]

    def cancel(self, request: Request) -> None:
        """The request was preempted."""
        self.preempted.add(request)
        if sequence := self._prefills.pop(request, None):
            self._num_prefill_tokens -= sequence.num_tokens
        if sequence := self.decodes.pop(request, None):
            # Time for draft tokens is not time for prompts: nobody else gets it.
            self._limit -= sequence.num_draft_tokens
            self._num_draft_tokens -= sequence.num_draft_tokens

    def shape(self) -> StepShape:
        return StepShape(
            num_prefill_tokens=self._num_prefill_tokens,
            num_decodes=len(self.decodes),
            num_context_tokens=sum(request.num_computed_tokens for request in self.decodes)
            + sum(request.num_computed_tokens for request in self._prefills),
            num_draft_tokens=self._num_draft_tokens,
        )

    def batch(self, take_operations: Callable[[], Sequence[KvOperation]]) -> ScheduledBatch | None:
        """None if nothing runs: what is to be done to the cache then waits for the next step."""
        if not self.decodes and not self._prefills:
            return None
        # Sequences of one padding class (`inputs.padding_class`) stand together.
        classes: dict[int, list[ScheduledSequence]] = defaultdict(list)
        for request, sequence in self.decodes.items():
            if sequence.num_draft_tokens:
                continue
            classes[(request.num_computed_tokens // self._block_size).bit_length()].append(sequence)
        decodes = chain.from_iterable(
            sorted(classes[number], key=_arena_row) for number in sorted(classes)
        )
        drafting = sorted(self.drafting(), key=_arena_row)
        prefills = sorted(self._prefills.values(), key=_arena_row)
        sequences = (*decodes, *drafting, *prefills)
        return ScheduledBatch(sequences, tuple(take_operations()), self.shape())


def _arena_row(sequence: ScheduledSequence) -> int:
    lease = sequence.request.lease
    return lease.row if lease else -1
