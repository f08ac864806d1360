"""Quantized experts on the CPU, multiplied by the library, one expert after another."""

from __future__ import annotations

import torch
from torch import Tensor

from .expert_pairs import ExpertPairs
from .packed_experts import ExpertParts, PackedExperts
from .quantized_linear_cpu import Panels, multiply_panels, pack_panels
from .quantized_weight import QuantizedWeight


class PanelExperts(PackedExperts):
    """Codes in panels of 16 outputs, as in `QuantizedPanelLinear`.

    The bits of a pair's result do not depend on the pairs that are computed with it.
    """

    @property
    def rounds_inputs(self) -> bool:
        """Whether inputs may be rounded to 16 bits."""
        return self.code_type.is_integer

    def pack(self, matrix: QuantizedWeight) -> ExpertParts:
        panels = pack_panels(matrix)
        return ExpertParts(panels.codes, panels.scale, panels.zero)

    def multiply(self, x: Tensor, pairs: ExpertPairs) -> Tensor:
        inputs = x.float().contiguous()
        y = torch.empty(len(x), self.out_features, dtype=torch.float32)
        for expert, mine in pairs.runs:
            multiply_panels(inputs[mine], self._panels(expert), None, y[mine])
        return y.to(x.dtype)

    def _panels(self, expert: int) -> Panels:
        return Panels(
            self.code_type,
            (self.out_features, self.in_features),
            self.group,
            self.codes[expert],
            self.scale[expert],
            None if self.zero is None else self.zero[expert],
            self.table,
        )
