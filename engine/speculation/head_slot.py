"""Memory for the EAGLE head of one adapter at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.linear import Linear
from ..model.load_quantization import LoadQuantization
from .eagle_head import EagleHead
from .head_values import num_values, with_values
from .packed_head import PackedHead


class HeadSlot:
    """A packed head whose weights come and go, while its memory stays: graphs of its passes read
    it. Everything runs on the current stream, so a pass never sees weights of two adapters."""

    def __init__(self, outline: EagleHead, fc: Linear, dtype: torch.dtype) -> None:
        """`outline`: the form of the heads. `fc`: the projection of the features, which all share.
        `dtype`: of the weights, on its device."""
        self._outline = outline
        # One zero for all values: the packed weights are the only ones that take memory.
        zeros = torch.zeros(1, dtype=dtype, device=fc.row_norms.device).expand(num_values(outline))
        self.head = PackedHead(with_values(outline, zeros), LoadQuantization(), fc=fc)

    def fill(self, values: Tensor) -> None:
        """Take over a head of `values [num_values]`. After an error the slot is to be erased."""
        self.head.fill(with_values(self._outline, values))

    def erase(self) -> None:
        """Zero the weights. The head must not run until the slot is filled again."""
        self.head.erase()
