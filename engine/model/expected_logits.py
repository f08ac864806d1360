"""The logits that the self-test of a base compares with, and their memory.

They live until the base is loaded, when its memory is highest. Of a large vocabulary all of them
would be megabytes, so each position keeps the logits of some tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_KEPT = 8192
"""Of a position's logits, unless that is less than one in `_MOST_SKIPPED`."""
_MOST_SKIPPED = 16
"""A sequence of so many positions keeps a logit of every token at least once."""


class ExpectedLogits(NamedTuple):
    """Of one sequence: at position p every nth token's, from token p modulo n on."""

    kept: Sequence[Tensor]
    """fp32, by position."""
    largest: Tensor
    """The largest absolute value of all of them."""
    num_skipped: int
    """n."""

    @classmethod
    def of(cls, logits: Tensor) -> ExpectedLogits:
        """logits: `[positions, tokens]`, of any dtype."""
        n = min(-(-logits.shape[1] // _MOST_KEPT), _MOST_SKIPPED)
        kept = [row[place % n :: n].float().clone() for place, row in enumerate(logits)]
        return cls(kept, logits.abs().max().float(), n)

    def error(self, positions: slice, logits: Tensor) -> Tensor:
        """The largest difference to what is kept of these positions, relative to the largest of all
        logits. logits: `[positions, tokens]`, fp32."""
        errors = [
            (row[place % self.num_skipped :: self.num_skipped] - expected).abs_().max()
            for place, expected, row in zip(
                range(positions.start, positions.stop), self.kept[positions], logits, strict=True
            )
        ]
        return torch.stack(errors).max() / self.largest
