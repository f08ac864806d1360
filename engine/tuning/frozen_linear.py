"""A linear layer of the base that gradients pass through, in the form in which it is stored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.stored_weights import Values


class FrozenLinear(nn.Linear):
    """Multiplies by the dequantized weight, and never changes it.

    The layer keeps codes and scales, or a dense weight in its file's dtype. Forward and backward
    make the weight in the serving dtype when they use it and drop it again, so at most one layer's
    is in memory. PEFT adapts the layer as any `nn.Linear`.
    """

    def __init__(self, weight: Values, bias: Tensor | None, dtype: torch.dtype) -> None:
        """weight: `[out, in]`; bias: `[out]`; dtype: the serving dtype."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self._values = weight
        self._dtype = dtype
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """`[out, in]` in the serving dtype, made anew by each use."""
        if isinstance(self._values, QuantizedWeight):
            return self._values.dequantize(self._dtype)
        return self._values.to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in]` to `[..., out]`, in x's dtype."""
        y: Tensor = _Multiply.apply(x, self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Multiply(torch.autograd.Function):
    """`x @ weight.T`. Keeps neither x nor the weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.weight.to(grad.dtype), None
