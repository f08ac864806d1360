"""Linear layers that read the same input but cannot be stored in one form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .linear import Linear


class JoinedLinear(Linear):
    """The outputs of several layers behind one another.

    A checkpoint may quantize siblings differently: other bits, another order of inputs, or one of
    them not at all.
    """

    def __init__(self, layers: Sequence[Linear]) -> None:
        biases = [layer.bias for layer in layers]
        present = next((bias for bias in biases if bias is not None), None)
        bias = None
        if present is not None:
            zeros = [present.new_zeros(layer.out_features) for layer in layers]
            pairs = zip(biases, zeros, strict=True)
            bias = torch.cat([zero if own is None else own for own, zero in pairs])
        super().__init__(
            (sum(layer.out_features for layer in layers), layers[0].in_features),
            bias,
            torch.cat([layer.row_norms for layer in layers]),
        )
        self._layers = tuple(layers)
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)
        self.weight_bytes = sum(layer.weight_bytes for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self._layers], dim=-1)

    def products(self, x: Tensor) -> Tensor:
        return torch.cat([layer.products(x) for layer in self._layers], dim=-1)
