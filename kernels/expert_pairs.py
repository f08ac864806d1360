"""The (token, expert) pairs of one MoE layer in a step, sorted by expert and adapter.

A *pair* is a token and one of the experts that the router chose for it. Pairs are sorted by expert
and within an expert by adapter, so that an expert's tokens are adjacent for the base matmul, and
those of one (expert, adapter) are adjacent for the LoRA delta.

On CUDA the Triton kernels read the pairs in tiles, whose number depends on the number of pairs
alone. So a captured step serves any routing. Prompts with many pairs per expert have no tiles:
larger products are faster there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .lora_batch import BASE_ROW, TILE_TOKENS

MAX_TILED_PAIRS = 32
"""The average number of pairs per expert up to which an eager step on CUDA has tiles. Each tile
reads its expert's matrix, from the L2 cache after the first. The best number is unmeasured."""


@dataclass(frozen=True, slots=True)
class ExpertSegment:
    """Adjacent pairs `[start, end)` of one expert and one adapter."""

    start: int
    end: int
    expert: int
    row: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The work of the Triton kernels: up to `TILE_TOKENS` adjacent pairs per tile."""

    base: Tensor
    """int32 `[num_tiles, 3]`: start, end, expert; an expert of -1 is no work."""
    lora: Tensor | None
    """int32 `[num_pairs, 3]`: start, end, expert row; an expert row of -1 is no work. None: no
    adapter changes any pair."""


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
    expert_rows: Tensor | None
    """int32 `[num_pairs]`: each pair's table row × num_experts + expert, -1 for the base; ascending
    within an expert. None: no adapter changes any pair."""
    tiles: ExpertTiles | None = None

    @property
    def num_pairs(self) -> int:
        return self.order.shape[0]

    @property
    def rows(self) -> Tensor | None:
        """int32 `[num_pairs]`: each pair's table row, -1 for the base."""
        return None if self.expert_rows is None else self.expert_rows // self.num_experts

    @cached_property
    def ends(self) -> Tensor:
        """int32 `[num_experts]` on the device: where each expert's pairs end."""
        bounds = torch.arange(self.num_experts, device=self.experts.device)
        return torch.searchsorted(self.experts, bounds, right=True).to(torch.int32)

    @cached_property
    def host_ends(self) -> list[int]:
        """`ends` in host memory: on CUDA this waits for the router, once for a layer."""
        return [int(end) for end in self.ends.tolist()]

    @property
    def runs(self) -> Iterator[tuple[int, slice]]:
        """Each expert with any pairs, and these. On CUDA this waits for the router."""
        start = 0
        for expert, end in enumerate(self.host_ends):
            if end > start:
                yield expert, slice(start, end)
            start = end

    @cached_property
    def segments(self) -> tuple[ExpertSegment, ...]:
        """The pairs that have an adapter. On CUDA this waits for the router."""
        if self.expert_rows is None:
            return ()
        runs, counts = torch.unique_consecutive(self.expert_rows, return_counts=True)
        segments, start = [], 0
        for expert_row, count in zip(runs.tolist(), counts.tolist(), strict=True):
            if expert_row != BASE_ROW:
                row, expert = divmod(expert_row, self.num_experts)
                segments.append(ExpertSegment(start, start + count, expert, row))
            start += count
        return tuple(segments)


def sort_pairs(
    top_k_index: Tensor,
    num_experts: int,
    token_rows: Tensor | None = None,
    num_rows: int = 0,
    *,
    is_captured: bool = False,
) -> ExpertPairs:
    """The pairs of `top_k_index`, integer `[num_tokens, top_k]`: each token's experts.

    token_rows: integer `[num_tokens]`, each token's table row below `num_rows`, -1 for the base.
    is_captured: the step becomes a graph, so the pairs have tiles whatever their number.
    Does not wait for the device.
    """
    is_tiled = is_captured or top_k_index.numel() <= MAX_TILED_PAIRS * num_experts
    if top_k_index.is_cuda and is_tiled:
        from . import expert_pairs_triton  # Triton is not installed everywhere

        return expert_pairs_triton.sort_pairs(top_k_index, num_experts, token_rows, num_rows)
    return plain_sort_pairs(top_k_index, num_experts, token_rows, num_rows, is_tiled=is_captured)


def plain_sort_pairs(
    top_k_index: Tensor,
    num_experts: int,
    token_rows: Tensor | None = None,
    num_rows: int = 0,
    *,
    is_tiled: bool = False,
) -> ExpertPairs:
    """The definition of `sort_pairs`."""
    top_k = top_k_index.shape[1]
    experts = top_k_index.reshape(-1).to(torch.int64)
    if token_rows is None:
        experts, order = experts.sort(stable=True)
        expert_rows = None
    else:
        stride = num_rows + 1  # rows and the base
        keys = experts * stride + token_rows.repeat_interleave(top_k) - BASE_ROW
        keys, order = keys.sort(stable=True)
        experts, rows = keys // stride, keys % stride + BASE_ROW
        expert_rows = torch.where(rows == BASE_ROW, BASE_ROW, rows * num_experts + experts)
        expert_rows = expert_rows.to(torch.int32)
    tiles = _plan_tiles(experts, expert_rows, num_experts) if is_tiled else None
    return ExpertPairs(num_experts, order, order // top_k, experts, expert_rows, tiles)


def sort_held_pairs(
    top_k_index: Tensor,
    held: range,
    token_rows: Tensor | None = None,
    num_rows: int = 0,
) -> ExpertPairs:
    """The pairs of `held` experts alone, which are numbered from the first of them; see
    `sort_pairs`. Waits for the device."""
    experts = top_k_index - held.start
    is_held = (experts >= 0) & (experts < len(held))
    numbered = torch.where(is_held, experts, len(held))  # the others come last
    pairs = plain_sort_pairs(numbered, len(held), token_rows, num_rows)
    count = int(is_held.sum())
    rows = pairs.expert_rows
    return ExpertPairs(
        len(held),
        pairs.order[:count],
        pairs.tokens[:count],
        pairs.experts[:count],
        None if rows is None else rows[:count],
    )


def _plan_tiles(experts: Tensor, expert_rows: Tensor | None, num_experts: int) -> ExpertTiles:
    num_pairs = len(experts)
    return ExpertTiles(
        base=plan_run_tiles(experts, max_runs=num_experts),
        lora=None if expert_rows is None else plan_run_tiles(expert_rows, max_runs=num_pairs),
    )


def plan_run_tiles(values: Tensor, *, max_runs: int) -> Tensor:
    """int32 `[num_tiles, 3]`: start, end and value of up to TILE_TOKENS adjacent equal values each.

    values: integer `[num_values]`; the tiles of -1 are no work. max_runs: an upper bound of the
    runs of equal values, because the actual number would need a synchronization. Unused tiles come
    last and have the value -1.
    """
    num_values = values.shape[0]
    num_tiles = min(num_values, max_runs + num_values // TILE_TOKENS)
    index = torch.arange(num_values, device=values.device)
    is_first = torch.ones_like(index, dtype=torch.bool)
    is_first[1:] = values[1:] != values[:-1]
    run_start = torch.where(is_first, index, 0).cummax(0).values
    is_start = (index - run_start) % TILE_TOKENS == 0
    place = torch.where(is_start, is_start.cumsum(0) - 1, num_tiles)  # the last one is for the rest
    starts = index.new_full((num_tiles + 1,), num_values)
    starts.scatter_(0, place, torch.where(is_start, index, num_values))
    start, end = starts[:-1], starts[1:]
    value = torch.where(start < num_values, values[start.clamp(max=num_values - 1)], -1)
    return torch.stack((start, end, value), dim=1).to(torch.int32)
