"""The inputs of the passes that draft token after token.

The first pass computes the known pairs of each chain, and each further one a single pair behind
them. So all of them are laid out at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention import AttentionBatch, SequenceGroup
from ..kv.sequence_blocks import BlockTable
from ..transfers import to_device


class ChainInputs:
    """The rows of some chains: in pass 0 the known ones, those of each chain adjacent, and in each
    further pass one of each chain."""

    positions: Tensor
    """int64 `[num_rows]`: of the rows of all passes, one pass after another."""

    def __init__(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[BlockTable],
        num_passes: int,
        *,
        block_size: int,
        device: torch.device,
    ) -> None:
        """`starts`: the position of each chain's first row, which is its place in the chain's
        blocks. `counts`: of its known rows. `tables`: blocks that hold all of its rows."""
        first, known = np.array(starts), np.array(counts)
        self._ends = np.cumsum(known)
        self._num_chains = len(known)
        # Where rows are padded, a chain's last one is computed again.
        self._padded = np.minimum(np.arange(known.max()), known[:, None] - 1)
        of_known = np.repeat(np.arange(len(known)), known)
        places = np.arange(len(of_known)) - np.repeat(self._ends - known, known) + first[of_known]
        further = np.arange(num_passes - 1)[:, None] + (first + known)
        positions = np.concatenate([places, further.ravel()])
        chains = np.concatenate([of_known, np.tile(np.arange(len(known)), num_passes - 1)])
        blocks = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for row, table in zip(blocks, tables, strict=True):
            row[: len(table)] = table
        slots = blocks[chains, positions // block_size] * block_size + positions % block_size
        self._device = device
        self._blocks = to_device(blocks, device)
        self.positions = to_device(positions, device)
        self._slots = to_device(slots, device)
        self._one_each = torch.arange(len(known), device=device)
        self._firsts = to_device(self._ends - known, device)

    def rows(self, index: int) -> slice:
        """Where a pass's rows lie in `positions`."""
        num_known = int(self._ends[-1])
        if index == 0:
            return slice(0, num_known)
        start = num_known + (index - 1) * self._num_chains
        return slice(start, start + self._num_chains)

    def last_rows(self, index: int) -> Tensor:
        """int64 `[num_chains]`: of a pass's rows the last of each chain."""
        return to_device(self._ends - 1, self._device) if index == 0 else self._one_each

    def attention(self, index: int) -> AttentionBatch:
        """That of a pass."""
        own = self.rows(index)
        positions, rows = self.positions[own], self._one_each[:, None]
        if index == 0:
            rows = self._firsts[:, None] + to_device(self._padded, self._device)
        group = SequenceGroup(rows, positions[rows], self._blocks)
        return AttentionBatch(self._slots[own], (group,), ())
