"""Which tokens each rank holds of the input embedding and of the output head. Torch-free."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

ROWS_PER_UNIT = 16
"""Parts begin at multiples of it. Kernels compute so many outputs of a weight together, so a rank
computes a token's logit as one rank does."""


class VocabularyPart(NamedTuple):
    """The tokens of one rank. The last rank also has those that adapters add."""

    tokens: range
    num_tokens: int
    """Those of the base."""

    @property
    def is_last(self) -> bool:
        """Whether it has the base's last token."""
        return self.tokens.stop == self.num_tokens


def divide_vocabulary(num_tokens: int, num_ranks: int) -> tuple[VocabularyPart, ...]:
    """The parts of all ranks in their order: adjacent tokens, the larger parts first. Empty if the
    vocabulary is too small for so many ranks: each of them holds all of it."""
    num_units = -(-num_tokens // ROWS_PER_UNIT)
    if num_units < num_ranks:
        return ()
    size, num_larger = divmod(num_units, num_ranks)
    starts = [rank * size + min(rank, num_larger) for rank in range(num_ranks + 1)]
    ends = [min(unit * ROWS_PER_UNIT, num_tokens) for unit in starts]
    return tuple(VocabularyPart(range(*pair), num_tokens) for pair in pairwise(ends))
