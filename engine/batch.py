"""What one step runs: the only thing the runner sees of the scheduler's decisions."""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
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
    new_block_ids: tuple[int, ...]
    """Blocks handed out for this step: the runner zeroes them before it writes."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)
