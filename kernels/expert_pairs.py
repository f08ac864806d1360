"""The (token, expert) pairs of one MoE layer in a step, sorted by expert and adapter.

A *pair* is a token and one of the experts that the router chose for it. Pairs are sorted by expert
and within an expert by adapter, so that an expert's tokens are adjacent for the base matmul, and
those of one (expert, adapter) are adjacent for the LoRA delta.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .lora_batch import BASE_ROW


@dataclass(frozen=True, slots=True)
class ExpertSegment:
    """Adjacent pairs `[start, end)` of one expert and one adapter."""

    start: int
    end: int
    expert: int
    row: int


@dataclass(frozen=True)
class ExpertPairs:
    """One layer's pairs, sorted."""

    num_experts: int
    order: Tensor
    """int64 `[num_pairs]`: token × top_k + choice, of the pair at each place."""
    tokens: Tensor
    """int64 `[num_pairs]`: each pair's token."""
    experts: Tensor
    """int64 `[num_pairs]`, ascending."""
    rows: Tensor | None
    """int64 `[num_pairs]`: each pair's table row, -1 for the base; ascending within an expert.
    None: no adapter changes any pair."""

    @property
    def num_pairs(self) -> int:
        return self.order.shape[0]

    @cached_property
    def ends(self) -> Tensor:
        """int32 `[num_experts]` on the device: where each expert's pairs end."""
        bounds = torch.arange(self.num_experts, device=self.experts.device)
        return torch.searchsorted(self.experts, bounds, right=True).to(torch.int32)

    @cached_property
    def host_ends(self) -> list[int]:
        """`ends` in host memory: on CUDA this waits for the router, once for a layer."""
        return [int(end) for end in self.ends.tolist()]

    @cached_property
    def segments(self) -> tuple[ExpertSegment, ...]:
        """The pairs that have an adapter. On CUDA this waits for the router."""
        if self.rows is None:
            return ()
        keys = torch.stack((self.experts, self.rows), dim=1)
        runs, counts = torch.unique_consecutive(keys, dim=0, return_counts=True)
        segments, start = [], 0
        for (expert, row), count in zip(runs.tolist(), counts.tolist(), strict=True):
            if row != BASE_ROW:
                segments.append(ExpertSegment(start, start + count, expert, row))
            start += count
        return tuple(segments)


def sort_pairs(
    top_k_index: Tensor, num_experts: int, token_rows: Tensor | None = None, num_rows: int = 0
) -> ExpertPairs:
    """The pairs of `top_k_index`, integer `[num_tokens, top_k]`: each token's experts.

    token_rows: integer `[num_tokens]`, each token's table row below `num_rows`, -1 for the base.
    Does not wait for the device.
    """
    top_k = top_k_index.shape[1]
    experts = top_k_index.reshape(-1).to(torch.int64)
    if token_rows is None:
        sorted_experts, order = experts.sort(stable=True)
        return ExpertPairs(num_experts, order, order // top_k, sorted_experts, None)
    stride = num_rows + 1  # rows and the base
    keys = experts * stride + token_rows.repeat_interleave(top_k) - BASE_ROW
    sorted_keys, order = keys.sort(stable=True)
    return ExpertPairs(
        num_experts=num_experts,
        order=order,
        tokens=order // top_k,
        experts=sorted_keys // stride,
        rows=sorted_keys % stride + BASE_ROW,
    )
