"""An embedding whose table is quantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .linear import QuantizedLinear


class QuantizedEmbedding(nn.Module):
    """Looks tokens up in the rows of a linear layer's weight, which may also be the output head's.

    Only the rows of the given tokens are dequantized.
    """

    weight: Tensor
    """Empty, in the dtype and on the device of the results: models ask their table for both."""

    def __init__(
        self, linear: QuantizedLinear, *, scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        """scale: the factor of all rows."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = linear.out_features, linear.in_features
        self.linear = linear
        self.scale = scale
        empty = torch.empty(0, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[...]` int64 to `[..., embedding_dim]`."""
        rows = self.linear.weight_rows(token_ids.reshape(-1)).to(self.weight.dtype)
        return (rows * self.scale).view(*token_ids.shape, self.embedding_dim)
