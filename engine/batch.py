"""What one step runs: the only thing the runner sees of the scheduler's decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .kv_layout import KvOperation
from .request import Request
from .step_costs import StepShape


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of one request, from `request.num_computed_tokens` on."""

    request: Request
    num_tokens: int

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
        return self.context_len == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Decoding sequences come first, then prefills grouped by adapter row."""

    sequences: tuple[ScheduledSequence, ...]
    operations: tuple[KvOperation, ...]
    """What happens to the KV cache before the step's forward, in this order and once."""
    shape: StepShape
    """As it was scheduled: sequences that end before the forward are counted."""

    @property
    def num_tokens(self) -> int:
        return self.shape.num_prefill_tokens + self.shape.num_decodes
