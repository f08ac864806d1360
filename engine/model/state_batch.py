"""A step's sequences for layers with states: their rows, and the blocks of their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...kernels.causal_conv import ConvIndex, conv_index
from ...kernels.state_rows import StateRows
from ..kv.block_pool import NULL_BLOCK
from ..kv.sequence_blocks import BlockTable
from ..transfers import to_device


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The sequences of a step in the order of their rows."""

    rows: StateRows
    """Their states before the step are blocks; the null block, which is zero, is a beginning."""
    targets: Tensor
    """int64 `[num_sequences]`: the block of the states after the step."""
    begins: Tensor
    """int64 `[num_sequences]`, in host memory: the first row of each."""
    counts: Tensor
    """int64 `[num_sequences]`, in host memory: the rows of each."""
    _conv_indices: dict[int, ConvIndex] = field(default_factory=dict)

    def conv_index(self, width: int) -> ConvIndex:
        """That of convolutions of this width."""
        found = self._conv_indices.get(width)
        if found is None:
            made = conv_index(self.begins, self.counts, width)
            device = self.targets.device
            found = ConvIndex(made.inputs.to(device), made.left.to(device))
            self._conv_indices[width] = found
        return found


def make_state_batch(
    tables: Sequence[BlockTable],
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    block_size: int,
    device: torch.device,
) -> StateBatch:
    """For each sequence its table in the group of states, the place of its first token, and its
    number of tokens."""
    spans = list(zip(tables, starts, counts, strict=True))
    sources = [t.item((start - 1) // block_size) if start else NULL_BLOCK for t, start, _ in spans]
    targets = [t.item((start + count - 1) // block_size) for t, start, count in spans]
    assert NULL_BLOCK not in targets, "the null block is never written"
    bounds = np.append(0, np.cumsum(counts))
    return StateBatch(
        rows=StateRows(to_device(bounds, device), to_device(sources, device, torch.int64)),
        targets=to_device(targets, device, torch.int64),
        begins=torch.from_numpy(bounds[:-1]),
        counts=torch.tensor(counts),
    )
