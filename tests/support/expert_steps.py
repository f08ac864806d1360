"""One linear map of an MoE layer's experts in a step, with adapters of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loraplex.adapters.layout import BaseLayout, Projection, Slice, SliceKind
from loraplex.kernels.expert_pairs import ExpertPairs
from loraplex.kernels.lora_batch import LoraTiles

from .lora_weights import PoisonedWeights

RANKS = (4, 1, 0, 7, 40)
"""Of the adapter of each row; the third does not change the experts."""
SLICE_INDEX = 1


class ExpertKernels(NamedTuple):
    """The modules with the kernels, compiled or interpreted, or what stands for them."""

    pairs: Any
    """`expert_pairs_triton`"""
    linear: Any
    """`grouped_linear_triton`"""
    lora: Any
    """`lora_triton`"""


class ExpertStep:
    """The experts that each token chose, the adapters of the tokens, and their inputs."""

    def __init__(
        self,
        chosen: Sequence[Sequence[int]],
        rows: Sequence[int],
        *,
        num_experts: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype = torch.float32,
        is_transposed: bool = False,
        has_bias: bool = False,
        device: str = "cpu",
    ) -> None:
        """chosen: the same number for each token. rows: each token's, of RANKS or -1."""
        part = Slice("experts", in_features, out_features, SliceKind.EXPERTS, num_experts)
        layout = BaseLayout("b", (Projection((Slice("linear", 8, 8),)), Projection((part,))))
        self.weights = PoisonedWeights(
            layout,
            num_rows=len(RANKS) + 1,
            dtype=dtype,
            capacity=max(1 << 19, 2 * sum(RANKS) * num_experts * (in_features + out_features)),
            device=device,
        )
        for row, rank in enumerate(RANKS):
            self.weights.put(row, {0: 3, SLICE_INDEX: rank} if rank else {0: 3})
        self.top_k_index = torch.tensor(chosen, device=device)
        self.token_rows = torch.tensor(rows, dtype=torch.int32, device=device)
        self.num_experts = num_experts
        self.is_transposed = is_transposed
        size = (in_features, out_features) if is_transposed else (out_features, in_features)
        weight = torch.randn(num_experts, *size) * in_features**-0.5
        self.weight = weight.to(device, dtype)
        bias = torch.randn(num_experts, out_features).to(device, dtype)
        self.bias = bias if has_bias else None
        self.x = torch.randn(len(rows), in_features).to(device, dtype)

    def sort(self, module: Any, tokens: slice = slice(None)) -> ExpertPairs:
        """The pairs of these tokens, by `expert_pairs_triton`."""
        pairs: ExpertPairs = module.sort_pairs(
            self.top_k_index[tokens], self.num_experts, self.token_rows[tokens], len(RANKS)
        )
        return pairs

    def run(self, kernels: ExpertKernels, tokens: slice = slice(None)) -> Tensor:
        """`[num_tokens × top_k, out]`: each choice of these tokens through its expert and the
        token's adapter."""
        pairs = self.sort(kernels.pairs, tokens)
        assert pairs.tiles is not None
        assert pairs.tiles.lora is not None
        x = self.x[tokens][pairs.tokens]
        y: Tensor = kernels.linear.multiply_tiles(
            x, self.weight, self.bias, pairs.tiles.base, is_transposed=self.is_transposed
        )
        kernels.lora.add_tiles(
            x,
            y,
            self.weights,
            pairs.expert_rows,
            LoraTiles(pairs.tiles.lora, max(RANKS)),
            first_slice=SLICE_INDEX,
            slice_outs=(y.shape[1],),
            num_experts=self.num_experts,
        )
        return torch.empty_like(y).index_copy_(0, pairs.order, y)

    def defined(self) -> Tensor:
        """The same, choice by choice, from the matrices themselves."""
        dtype, results = self.x.dtype, []
        for token, experts in enumerate(self.top_k_index.tolist()):
            x, row = self.x[token].float(), int(self.token_rows[token])
            for expert in experts:
                weight = self.weight[expert].float()
                y = (x @ (weight if self.is_transposed else weight.T)).to(dtype)
                if self.bias is not None:
                    y += self.bias[expert]
                if row >= 0 and RANKS[row]:
                    a, b = self.weights.matrices(row, SLICE_INDEX)
                    rank = slice(expert * RANKS[row], (expert + 1) * RANKS[row])
                    h = (x @ a[rank].float().T).to(dtype).float()
                    y = (y.float() + h @ b[rank].float()).to(dtype)
                results.append(y)
        return torch.stack(results)

    def changed_alone(self, kernels: ExpertKernels) -> list[int]:
        """The tokens of which a bit changes where no other shares their step."""
        together = self.run(kernels).view(*self.top_k_index.shape, -1)
        tokens = [slice(token, token + 1) for token in range(len(together))]
        return [
            own.start
            for own in tokens
            if not torch.equal(self.run(kernels, own).view_as(together[own]), together[own])
        ]
