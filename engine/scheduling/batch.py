"""What one step runs: the only thing the runner sees of the scheduler's decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..kv.layout import KvOperation
from ..request import Request
from .step_costs import StepShape


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of one request, from `request.num_computed_tokens` on."""

    request: Request
    num_tokens: int
    """Known and draft tokens."""
    num_draft_tokens: int = 0
    """How many of them, at the end, are drafted."""

    @property
    def num_known_tokens(self) -> int:
        return self.num_tokens - self.num_draft_tokens

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1

    @property
    def context_len(self) -> int:
        """Tokens in the cache once the step has run."""
        return self.request.num_computed_tokens + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last known token, so that the next is drawn."""
        return self.context_len - self.num_draft_tokens == len(self.request.token_ids)

    @property
    def read(self) -> range:
        """Positions of the prompt that the step computes and that are to be read."""
        unread = self.request.unread
        start = max(unread.start, self.request.num_computed_tokens)
        return range(start, max(start, min(unread.stop, self.context_len)))

    @property
    def num_logits_rows(self) -> int:
        """Its last rows whose logits are looked at: those to draw from and those to read."""
        if self.request.reads_logits and (read := self.read):
            return self.context_len - read.start
        return 1 + self.num_draft_tokens

    def with_draft(self) -> ScheduledSequence:
        """With what the request's draft really has, which may be less than was scheduled."""
        num_draft_tokens = len(self.request.draft)
        return ScheduledSequence(
            self.request, self.num_known_tokens + num_draft_tokens, num_draft_tokens
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
