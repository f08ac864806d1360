"""A step while it is scheduled, its batch, and the parts in which the batch runs.

The batch is all that the runner sees of the scheduler's decisions. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from ...adapters.leases import Lease
from ..errors import EngineError
from ..kv.layout import KvOperation, whole_blocks
from ..messages import RequestStarted
from ..request import Request
from .step_costs import StepShape


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of one request, from position `start` on.

    It says what the step computes, whatever becomes of the request while the step is in flight.
    """

    request: Request
    num_tokens: int
    """Known and draft tokens; a pending token counts as known."""
    num_draft_tokens: int
    """How many of them, at the end, are drafted."""
    start: int
    samples: bool
    """Whether the step reaches the request's last known token, so that the next is drawn."""
    lease: Lease | None
    """The request's, under which its adapter may be used; None: it acts on none of the tokens."""

    @classmethod
    def of(cls, request: Request, num_tokens: int, num_draft_tokens: int = 0) -> ScheduledSequence:
        """The next tokens of a request."""
        samples = num_tokens - num_draft_tokens == request.num_remaining_tokens
        start = request.num_computed_tokens
        lease = request.lease if start + num_tokens > request.adapter_start else None
        return cls(request, num_tokens, num_draft_tokens, start, samples, lease)

    @property
    def num_known_tokens(self) -> int:
        return self.num_tokens - self.num_draft_tokens

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1

    @property
    def known_end(self) -> int:
        """Where its draft tokens begin."""
        return self.start + self.num_tokens - self.num_draft_tokens

    @property
    def draws(self) -> bool:
        """Whether the step gives the request a token."""
        return self.samples and self.request.submitted.sampling.max_tokens > 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens

    @property
    def context_len(self) -> int:
        """Tokens that its last one attends to."""
        return self.start + self.num_tokens - self.request.kv.num_evicted

    @property
    def compacts(self) -> bool:
        """Whether the step moves what the request keeps of its cache."""
        return self.end == self.request.kv.compacts_at

    @property
    def read(self) -> range:
        """Positions of the prompt that the step computes and that are to be read."""
        unread = self.request.unread
        start = max(unread.start, self.start)
        return range(start, max(start, min(unread.stop, self.end)))

    @property
    def num_logits_rows(self) -> int:
        """Its last rows whose logits are looked at: those to draw from and those to read."""
        if self.request.reads_logits and (read := self.read):
            return self.end - read.start
        return 1 + self.num_draft_tokens

    def with_draft(self) -> ScheduledSequence:
        """With what the request's draft really has, which may be less than was scheduled."""
        num_draft_tokens = len(self.request.draft)
        return self._replace(
            num_tokens=self.num_known_tokens + num_draft_tokens, num_draft_tokens=num_draft_tokens
        )


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Decoding sequences come first, then those with drafts, then prefills; grouped by
    adapter row, decodes within their padding class."""

    sequences: tuple[ScheduledSequence, ...]
    operations: tuple[KvOperation, ...]
    """What happens to the KV cache before the step's forward, in this order and once."""
    shape: StepShape
    """Sequences that end before the forward are counted."""

    def running(self, sequences: tuple[ScheduledSequence, ...]) -> ScheduledBatch:
        """What of it really runs, with the drafts that there are."""
        num_draft_tokens = sum(sequence.num_draft_tokens for sequence in sequences)
        shape = self.shape._replace(num_draft_tokens=num_draft_tokens)
        return replace(self, sequences=sequences, shape=shape)

    @property
    def num_tokens(self) -> int:
        shape = self.shape
        return shape.num_prefill_tokens + shape.num_decodes + shape.num_draft_tokens


MAX_ROWS = 1 << 20
"""More than an arena has. Sort keys stay below 2^30, where Python compares integers fastest."""
_DRAFTING = 60
"""After the padding classes of decodes."""
_PREFILL = 61

Part = tuple[ScheduledSequence, ...]


def parts_of(sequences: Sequence[ScheduledSequence]) -> Iterator[Part]:
    """The parts of a step: the suspects of one adapter run in a separate forward pass, and so does
    each suspect of the base.

    A request in a step in which the engine crashed may or may not have caused that. If its adapter
    runs alone, another crash is the adapter's own, and results clear it. A pass for each request
    would take several times as long, and all other requests of the engine wait for it.
    """
    others = tuple(each for each in sequences if not each.request.num_lone_steps)
    if others:
        yield others
    suspects: dict[AdapterKey | str, list[ScheduledSequence]] = {}
    for sequence in sequences:
        if sequence.request.num_lone_steps:
            sequence.request.num_lone_steps -= 1
            key = sequence.request.submitted.lone_key
            suspects.setdefault(key, []).append(sequence)
    yield from map(tuple, suspects.values())


class Step:
    """A step while it is scheduled."""

    def __init__(
        self,
        *,
        budget: int,
        block_size: int,
        max_read_rows: int,
        is_ahead: bool,
        ends_at_blocks: bool = False,
        order: BatchOrder | None = None,
    ) -> None:
        """is_ahead: another step is in flight, so nobody is preempted. ends_at_blocks: see
        `KvBlocks.holds_states`. order: that of the steps before; None: this is the first."""
        self.decodes: dict[Request, ScheduledSequence] = {}
        """Added to directly, by `Scheduler`: it is the hot loop."""
        self.sort_keys: list[int] = []
        """Likewise, those of the first decodes in the batch: multiples of `MAX_ROWS` by the padding
        class of what is cached (`inputs.padding_class`), and the row of the adapter."""
        self.num_context_tokens = 0
        """Likewise, what is cached of these."""
        self.started: list[RequestStarted] = []
        self.failed: list[tuple[Request, EngineError]] = []
        self.preempted: set[Request] = set()
        self.is_short = False
        """Whether a running request had to give blocks back: then none is admitted."""
        self.num_draft_tokens = 0
        """Of all decodes."""
        self.is_ahead = is_ahead
        self.is_held_up = False
        """Whether a request must wait until no step is in flight."""
        self._block_size = block_size
        self._ends_at_blocks = ends_at_blocks
        self._prefills: dict[Request, ScheduledSequence] = {}
        self._limit = budget
        self._num_free_rows = max_read_rows
        self._num_prefill_tokens = 0
        self._order = order or BatchOrder()

    @property
    def budget(self) -> int:
        """Tokens that may still be added."""
        return self._limit - len(self.decodes) - self.num_draft_tokens - self._num_prefill_tokens

    @property
    def target_itl_seconds(self) -> float:
        """The strictest ITL target of the decodes; infinite if none has one."""
        targets = (request.targets.itl_seconds for request in self.decodes)
        return min((target for target in targets if target is not None), default=math.inf)

    def leave_at_most(self, num_tokens: int) -> None:
        """Let no more than so many tokens be added from now on."""
        self._limit -= max(self.budget - num_tokens, 0)

    def room_for(self, request: Request) -> int:
        """How many of the request's known tokens may be added; 0: none in this step."""
        # No step computes tokens on both sides of a compaction.
        num_uncompacted = request.kv.compacts_at - request.num_computed_tokens
        num_tokens = min(request.num_remaining_tokens, self.budget, num_uncompacted)
        if request.reads_logits and request.unread:
            if not self._num_free_rows:
                return 0
            num_unkept = request.unread.start - request.num_computed_tokens
            num_tokens = min(num_tokens, num_unkept + self._num_free_rows)
        if self._ends_at_blocks:
            return whole_blocks(request.num_computed_tokens, num_tokens, self._block_size)
        return num_tokens

    def add(self, request: Request, num_tokens: int) -> None:
        sequence = ScheduledSequence.of(request, num_tokens)
        if request.reads_logits:
            self._num_free_rows -= len(sequence.read)
        if num_tokens == 1:
            self.decodes[request] = sequence
        else:
            self._prefills[request] = sequence
            self._num_prefill_tokens += num_tokens

    def draft_token(self, request: Request, num_tokens: int) -> None:
        """Let a decoding request verify so many draft tokens as well, and no others."""
        self.num_draft_tokens += num_tokens - self.decodes[request].num_draft_tokens
        self.decodes[request] = ScheduledSequence.of(request, 1 + num_tokens, num_tokens)

    def drafting(self) -> list[ScheduledSequence]:
        """Those that verify draft tokens."""
        return [sequence for sequence in self.decodes.values() if sequence.num_draft_tokens]

    def cancel(self, request: Request) -> None:
        """The request was preempted."""
        self.preempted.add(request)
        if sequence := self._prefills.pop(request, None):
            self._num_prefill_tokens -= sequence.num_tokens
        if sequence := self.decodes.pop(request, None):
            # Time for draft tokens is not time for prompts: no other request gets it.
            self._limit -= sequence.num_draft_tokens
            self.num_draft_tokens -= sequence.num_draft_tokens

    def shape(self) -> StepShape:
        """What the step costs so far."""
        sequences = chain(self.decodes.values(), self._prefills.values())
        return self._shape(sum(each.start - each.request.kv.num_evicted for each in sequences))

    def _shape(self, num_context_tokens: int) -> StepShape:
        return StepShape(
            num_prefill_tokens=self._num_prefill_tokens,
            num_decodes=len(self.decodes),
            num_context_tokens=num_context_tokens,
            num_draft_tokens=self.num_draft_tokens,
        )

    def batch(self, take_operations: Callable[[], Sequence[KvOperation]]) -> ScheduledBatch | None:
        """None if nothing runs: what is to be done to the cache then waits for the next step."""
        sequences = [*self.decodes.values(), *self._prefills.values()]
        if not sequences:
            return None
        num_context_tokens, sort_keys = self.num_context_tokens, self.sort_keys
        if self.preempted or self.num_draft_tokens or len(sort_keys) != len(self.decodes):
            num_context_tokens, sort_keys = 0, []  # some of the decodes have changed
        for sequence in sequences[len(sort_keys) :]:
            num_cached = sequence.start - sequence.request.kv.num_evicted
            num_context_tokens += num_cached
            sort_keys.append(self._sort_key(sequence, num_cached))
        ordered = self._order.sort(sequences, sort_keys)
        return ScheduledBatch(ordered, tuple(take_operations()), self._shape(num_context_tokens))

    def _sort_key(self, sequence: ScheduledSequence, num_cached: int) -> int:
        if sequence.num_tokens == 1:
            kind = (num_cached // self._block_size).bit_length()
        else:
            kind = _DRAFTING if sequence.num_draft_tokens else _PREFILL
        return kind * MAX_ROWS + (sequence.lease.row if sequence.lease else -1)


class BatchOrder:
    """Sorts the sequences of steps by their keys, and remembers the order of the last one.

    While the same requests decode, most steps have the keys of the one before.
    """

    def __init__(self) -> None:
        self._sort_keys: list[int] = []
        self._order: list[int] = []

    def sort(
        self, sequences: list[ScheduledSequence], sort_keys: list[int]
    ) -> tuple[ScheduledSequence, ...]:
        """By their sort keys; those of the same key stay in the order given."""
        if sort_keys != self._sort_keys:
            self._sort_keys = sort_keys
            self._order = sorted(range(len(sort_keys)), key=sort_keys.__getitem__)
        return tuple(map(sequences.__getitem__, self._order))
