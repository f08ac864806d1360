"""Quantized experts on CUDA (weight-only), multiplied by activations of 16 or 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from .expert_pairs import ExpertPairs
from .packed_experts import ExpertParts, PackedExperts
from .quantized_weight import QuantizedWeight
from .wna16_weight import WNA16Weight, pack_codes, served_group


class WNA16Experts(PackedExperts):
    """The codes of all experts in the layout of `wna16_weight`.

    Pairs with tiles are multiplied in one launch. For the others, which are a prompt's, one expert
    after another is dequantized: its product is large enough to repay that.
    """

    def pack(self, matrix: QuantizedWeight) -> ExpertParts:
        packed = pack_codes(matrix)
        return ExpertParts(packed.words, packed.scale, packed.zero)

    def multiply(self, x: Tensor, pairs: ExpertPairs) -> Tensor:
        # Triton is not installed everywhere
        from .wna16_experts_triton import multiply_quantized_tiles
        from .wna16_triton import dequantize_weight

        if pairs.tiles is not None:
            return multiply_quantized_tiles(x.contiguous(), self._matrix(0), pairs.tiles.base)
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        for expert, mine in pairs.runs:
            torch.mm(x[mine], dequantize_weight(self._matrix(expert), x.dtype).T, out=y[mine])
        return y

    def _matrix(self, expert: int) -> WNA16Weight:
        """Its groups are those of `pack_codes`, which may be smaller than the format's."""
        return WNA16Weight(
            self.code_type,
            self.codes[expert],
            self.scale[expert],
            None if self.zero is None else self.zero[expert],
            self.table,
            served_group(self.group, self.in_features, has_zeros=self.zero is not None),
            self.in_features,
        )
