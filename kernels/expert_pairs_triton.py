"""Sorting an MoE layer's pairs and planning their tiles in one Triton kernel; see `expert_pairs`.

A small step has few pairs, so each is compared with all others: the number of pairs that come
before it is its place. PyTorch's operations would take about thirty launches per layer.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .expert_pairs import ExpertPairs, ExpertTiles
from .lora_batch import TILE_TOKENS

SORT_CONSTANTS: dict[str, Any] = {
    "TILE_TOKENS": TILE_TOKENS,
    "BLOCK_PAIRS": 32,
    "BLOCK_OTHERS": 128,
}
SORT_OPTIONS: dict[str, Any] = {"num_warps": 4}


def sort_pairs(
    top_k_index: Tensor, num_experts: int, token_rows: Tensor | None, num_rows: int
) -> ExpertPairs:
    """See `expert_pairs.sort_pairs`; with tiles. token_rows: int32."""
    num_tokens, top_k = top_k_index.shape
    num_pairs, device = num_tokens * top_k, top_k_index.device
    order, tokens, experts = torch.empty(3, num_pairs, dtype=torch.int64, device=device)
    num_tiles = (num_pairs - 1) // TILE_TOKENS + num_experts
    base = torch.full((num_tiles, 3), -1, dtype=torch.int32, device=device)
    expert_rows = lora = None
    if token_rows is not None:
        expert_rows = torch.empty(num_pairs, dtype=torch.int32, device=device)
        lora = torch.empty(num_pairs, 3, dtype=torch.int32, device=device)
    sort_kernel[(triton.cdiv(num_pairs, SORT_CONSTANTS["BLOCK_PAIRS"]),)](
        order,
        tokens,
        experts,
        expert_rows,
        base,
        lora,
        top_k_index.contiguous(),
        token_rows,
        num_pairs,
        num_rows,
        num_experts,
        top_k,
        **SORT_CONSTANTS,
        **SORT_OPTIONS,
    )
    tiles = ExpertTiles(base, lora)
    return ExpertPairs(num_experts, order, tokens, experts, expert_rows, tiles)


@triton.jit(do_not_specialize=["num_pairs", "num_rows", "num_experts", "top_k"])
def sort_kernel(
    order_ptr: tl.tensor,  # int64, as tokens and experts
    tokens_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    expert_rows_ptr: tl.tensor,  # None, as lora_tiles and token_rows: no adapter changes any pair
    base_tiles_ptr: tl.tensor,
    lora_tiles_ptr: tl.tensor,
    top_k_index_ptr: tl.tensor,
    token_rows_ptr: tl.tensor,
    num_pairs: int,
    num_rows: int,
    num_experts: int,
    top_k: int,
    TILE_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
) -> None:
    """Find the places of a block of pairs, and write there what belongs to them."""
    pairs = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    inside = pairs < num_pairs
    experts = tl.load(top_k_index_ptr + pairs, mask=inside, other=0).to(tl.int32)
    rows = tl.full((BLOCK_PAIRS,), -1, dtype=tl.int32)
    if token_rows_ptr is not None:
        rows = tl.load(token_rows_ptr + pairs // top_k, mask=inside, other=-1)
    keys = experts * (num_rows + 1) + rows

    expert_start = tl.full((BLOCK_PAIRS,), 0, dtype=tl.int32)
    expert_size = tl.full((BLOCK_PAIRS,), 0, dtype=tl.int32)
    key_start = tl.full((BLOCK_PAIRS,), 0, dtype=tl.int32)
    key_size = tl.full((BLOCK_PAIRS,), 0, dtype=tl.int32)
    key_index = tl.full((BLOCK_PAIRS,), 0, dtype=tl.int32)
    for first in range(0, num_pairs, BLOCK_OTHERS):
        others = first + tl.arange(0, BLOCK_OTHERS)
        exist = others < num_pairs
        # Those beyond the last pair come after all.
        other_experts = tl.load(top_k_index_ptr + others, mask=exist, other=num_experts)
        other_experts = other_experts.to(tl.int32)
        other_rows = tl.full((BLOCK_OTHERS,), -1, dtype=tl.int32)
        if token_rows_ptr is not None:
            other_rows = tl.load(token_rows_ptr + others // top_k, mask=exist, other=-1)
        other_keys = other_experts * (num_rows + 1) + other_rows
        shares_expert = other_experts[None, :] == experts[:, None]
        shares_key = other_keys[None, :] == keys[:, None]
        is_earlier = others[None, :] < pairs[:, None]
        expert_start += tl.sum((other_experts[None, :] < experts[:, None]).to(tl.int32), axis=1)
        expert_size += tl.sum(shares_expert.to(tl.int32), axis=1)
        key_start += tl.sum((other_keys[None, :] < keys[:, None]).to(tl.int32), axis=1)
        key_size += tl.sum(shares_key.to(tl.int32), axis=1)
        key_index += tl.sum((shares_key & is_earlier).to(tl.int32), axis=1)

    places = key_start + key_index
    tl.store(order_ptr + places, pairs.to(tl.int64), mask=inside)
    tl.store(tokens_ptr + places, (pairs // top_k).to(tl.int64), mask=inside)
    tl.store(experts_ptr + places, experts.to(tl.int64), mask=inside)

    # Tiles of an expert begin TILE_TOKENS apart, and a next expert's number is higher: no two tiles
    # have the same place in the table.
    expert_index = places - expert_start
    tile_ptrs = base_tiles_ptr + (places // TILE_TOKENS + experts) * 3
    is_start = inside & (expert_index % TILE_TOKENS == 0)
    ends = places + tl.minimum(expert_size - expert_index, TILE_TOKENS)
    tl.store(tile_ptrs, places, mask=is_start)
    tl.store(tile_ptrs + 1, ends, mask=is_start)
    tl.store(tile_ptrs + 2, experts, mask=is_start)

    if token_rows_ptr is not None:
        expert_rows = tl.where(rows < 0, -1, rows * num_experts + experts)
        tl.store(expert_rows_ptr + places, expert_rows, mask=inside)
        tile_ptrs = lora_tiles_ptr + places * 3
        ends = places + tl.minimum(key_size - key_index, TILE_TOKENS)
        tl.store(tile_ptrs, places, mask=inside)
        tl.store(tile_ptrs + 1, ends, mask=inside)
        work = tl.where(key_index % TILE_TOKENS == 0, expert_rows, -1)
        tl.store(tile_ptrs + 2, work, mask=inside)
