"""Random Medusa heads."""

from __future__ import annotations

import torch

from loraplex.engine.speculation.medusa_heads import MedusaHeads


def make_heads(
    hidden_size: int, vocab_size: int, *, num_heads: int, num_layers: int = 1, seed: int = 0
) -> MedusaHeads:
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.5

    return MedusaHeads(
        randn(num_layers, num_heads, hidden_size, hidden_size),
        randn(num_layers, num_heads, hidden_size),
        randn(num_heads, vocab_size, hidden_size),
    )
