"""Medusa heads (Cai et al. 2024): each predicts one of the next tokens from one hidden state.

Head j reads the input that the model's output head had when it sampled a token, and predicts the
token j + 1 places after that one. A head is a number of residual blocks x + SiLU(W x + b) and a
projection to the vocabulary. The layers of all heads are stacked in one tensor each, so that all
heads are one product per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MedusaHeads(nn.Module):
    """The heads of one checkpoint; every one has the same number of blocks."""

    def __init__(self, weights: Tensor, biases: Tensor, projections: Tensor) -> None:
        """`weights [num_layers, num_heads, hidden_size, hidden_size]` (out, in), `biases
        [num_layers, num_heads, hidden_size]`, `projections [num_heads, vocab_size, hidden_size]`.
        """
        super().__init__()
        self.weights = nn.Parameter(weights)
        self.biases = nn.Parameter(biases)
        self.projections = nn.Parameter(projections)

    @property
    def num_heads(self) -> int:
        return len(self.projections)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())

    def forward(self, hidden_states: Tensor, num_heads: int | None = None) -> Tensor:
        """Logits `[num_heads, num_rows, vocab_size]` of `hidden_states [num_rows, hidden_size]`.

        `num_heads`: only the first ones.
        """
        heads = slice(num_heads)
        x = hidden_states.expand(len(self.projections[heads]), -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            update = torch.baddbmm(bias[heads, None], x, weight[heads].transpose(1, 2))
            x = x + F.silu(update)
        return torch.bmm(x, self.projections[heads].transpose(1, 2))


def untrained_heads(output_head: nn.Linear, *, num_heads: int, num_layers: int) -> MedusaHeads:
    """Heads that equal the model's own output head: the start of training."""
    projection = output_head.weight.detach()
    size = projection.shape[1]
    return MedusaHeads(
        projection.new_zeros(num_layers, num_heads, size, size),
        projection.new_zeros(num_layers, num_heads, size),
        projection.expand(num_heads, -1, -1).clone(),
    )


def named_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """The tensors by the names that the original implementation gives them."""
    num_layers = len(heads.weights)
    tensors: dict[str, Tensor] = {}
    for head in range(heads.num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = heads.weights[layer, head]
            tensors[f"{head}.{layer}.linear.bias"] = heads.biases[layer, head]
        tensors[f"{head}.{num_layers}.weight"] = heads.projections[head]
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def tensor_shapes(
    *, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes in `named_tensors` of such heads."""
    for head in range(num_heads):
        for layer in range(num_layers):
            yield f"{head}.{layer}.linear.weight", (hidden_size, hidden_size)
            yield f"{head}.{layer}.linear.bias", (hidden_size,)
        yield f"{head}.{num_layers}.weight", (vocab_size, hidden_size)


def assembled(tensors: Mapping[str, Tensor], *, num_heads: int, num_layers: int) -> MedusaHeads:
    """The heads with these named tensors, which are all there and have their shapes."""

    def blocks(leaf: str) -> Tensor:
        return torch.stack(
            [
                torch.stack([tensors[f"{head}.{layer}.{leaf}"] for head in range(num_heads)])
                for layer in range(num_layers)
            ]
        )

    projections = [tensors[f"{head}.{num_layers}.weight"] for head in range(num_heads)]
    return MedusaHeads(blocks("linear.weight"), blocks("linear.bias"), torch.stack(projections))
