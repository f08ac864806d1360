"""The tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .tokens import TrainedTokens

NOT_TRAINED = -100
"""The label of a position that adds nothing to the loss, as PyTorch has it."""


class Batch(NamedTuple):
    """Sequences of equal length, filled up at their ends.

    Attention is causal, so what fills a sequence up changes nothing before it.
    """

    input_ids: Tensor
    """int64 `[sequences, length]`."""
    labels: Tensor
    """int64 `[sequences, length]`: at each trained token its ID, elsewhere NOT_TRAINED."""
    position_ids: Tensor | None
    """int64 `[sequences, length]`, from 0 in each packed example; None: nothing is packed."""


def make_batch(sequences: Sequence[Sequence[TrainedTokens]], *, is_packed: bool) -> Batch:
    """sequences: the examples of each, which do not attend to each other."""
    length = max(sum(len(each.token_ids) for each in sequence) for sequence in sequences)
    token_ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    labels = torch.full_like(token_ids, NOT_TRAINED)
    positions = torch.zeros_like(token_ids)
    for row, sequence in enumerate(sequences):
        start = 0
        for example in sequence:
            own = slice(start, start := start + len(example.token_ids))
            ids = torch.tensor(example.token_ids)
            token_ids[row, own] = ids
            labels[row, own] = ids.where(torch.tensor(example.is_trained), NOT_TRAINED)
            positions[row, own] = torch.arange(len(ids))
        positions[row, start:] = torch.arange(length - start)
    return Batch(token_ids, labels, positions if is_packed else None)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch on this device."""
    return Batch(*(None if each is None else each.to(device) for each in batch))  # type: ignore[arg-type]
