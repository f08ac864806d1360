"""The tokens that each logits row of a step may sample, where adapters have added some.

A step's logits are as wide as the largest vocabulary of its adapters. What an adapter's vocabulary
does not have gets minus infinity in its rows, and so has no probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transfers import to_device

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class StepVocabulary:
    """The vocabularies of a step's logits rows; at least one is not the base's."""

    num_added: int
    """Columns of the logits beyond the base's."""
    smallest: int
    """The tokens of the smallest."""
    sizes: Tensor
    """int64 `[num_logits_rows]`: the tokens of each row's."""

    @classmethod
    def of(
        cls, sizes: Sequence[int], base_size: int, device: torch.device
    ) -> StepVocabulary | None:
        """None if all rows have the base's."""
        if all(size == base_size for size in sizes):
            return None
        added = max(0, max(sizes) - base_size)
        return cls(added, min(sizes), to_device(sizes, device, torch.int64))

    @torch.inference_mode()
    def hide(self, logits: Tensor) -> None:
        """Hide the tokens that a row's vocabulary does not have, in place: `logits
        [num_logits_rows, vocab_size + num_added]`."""
        tokens = torch.arange(self.smallest, logits.shape[1], device=logits.device)
        logits[:, self.smallest :].masked_fill_(tokens >= self.sizes[:, None], _HIDDEN)
