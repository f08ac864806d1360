"""The LoRA op on the experts of an MoE layer: each expert's linear map has its own A and B.

For each pair p (see `expert_pairs`) of expert e and adapter row w, where w changes the slice:

    h = round(x[p] @ A[w, e].T)
    y[p] = round(y[p] + h @ B[w, e])

with the arithmetic of `lora_reference`. A slice's A is `[experts, rank, in]` and its B, transposed,
`[experts, rank, out]`. For the dense op, each expert of an adapter is a separate table row, whose
matrices begin `expert × rank × width` elements further on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .expert_pairs import ExpertPairs
from .lora_batch import BASE_ROW, TILE_TOKENS, LoraBatch, LoraTiles
from .lora_reference import add_lora_reference
from .lora_weights import AdapterWeights

FEW_PAIRS = 8
"""Up to here a half type is multiplied in fp32 on the CPU: setting up oneDNN takes longer."""


def add_experts(
    x: Tensor,
    y: Tensor,
    weights: AdapterWeights,
    slice_index: int,
    pairs: ExpertPairs,
    batch: LoraBatch,
) -> None:
    """Add each pair's LoRA delta of one slice to y, in place.

    x `[num_pairs, in]` and y `[num_pairs, out]`, in the order of `pairs` and the type of
    `weights.flat`, rows dense. Raises ValueError if shapes or types do not fit.
    """
    _check(x, y, weights, pairs)
    if pairs.rows is None:
        return
    if batch.tiles is None:
        add_expert_segments(x, y, weights, slice_index, pairs)
    else:
        _add_on_gpu(x, y, weights, slice_index, pairs, batch)


def add_experts_reference(
    x: Tensor, y: Tensor, weights: AdapterWeights, slice_index: int, pairs: ExpertPairs
) -> None:
    """The meaning of `add_experts` in plain PyTorch; its arguments."""
    assert pairs.rows is not None
    experts = expert_rows(weights, slice_index, pairs, x.shape[1], y.shape[1])
    add_lora_reference(
        x, y, experts.flat, experts.table, experts.pair_rows, slice_outs=(y.shape[1],)
    )


def add_expert_segments(
    x: Tensor, y: Tensor, weights: AdapterWeights, slice_index: int, pairs: ExpertPairs
) -> None:
    """`add_experts` by one matmul each way for every (expert, adapter)."""
    in_features, out_features = x.shape[1], y.shape[1]
    for segment in pairs.segments:
        a_offset, b_offset, rank = weights.row_tables[segment.row][slice_index]
        if not rank:
            continue
        a = _expert_matrix(weights.flat, a_offset, segment.expert, rank, in_features)
        b = _expert_matrix(weights.flat, b_offset, segment.expert, rank, out_features)
        _add_segment(x[segment.start : segment.end], y[segment.start : segment.end], a, b)


def _add_segment(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `x [pairs, in] @ a.T @ b` to `y [pairs, out]`, in place."""
    if x.dtype == torch.float32 or x.shape[0] > FEW_PAIRS:
        y.addmm_(x @ a.T, b)
        return
    h = (x.float() @ a.float().T).to(x.dtype)  # [pairs, rank]
    y += h.float() @ b.float()


@dataclass(slots=True)
class ExpertRows:
    """One slice of all adapters for the dense op: a table row per (adapter, expert)."""

    flat: Tensor
    table: Tensor
    """int64 `[num_rows × num_experts, 1, 3]`."""
    pair_rows: Tensor
    """int32 `[num_pairs]`: row × num_experts + expert; -1 for the base."""


def expert_rows(
    weights: AdapterWeights,
    slice_index: int,
    pairs: ExpertPairs,
    in_features: int,
    out_features: int,
) -> ExpertRows:
    """Spread a slice's table over its experts, on the device and without waiting for it."""
    assert pairs.rows is not None
    a_offset, b_offset, rank = weights.table[:, slice_index, :, None].unbind(1)  # [num_rows, 1]
    skipped = rank * torch.arange(pairs.num_experts, device=rank.device)  # [num_rows, experts]
    table = torch.stack(
        (
            a_offset + skipped * in_features,
            b_offset + skipped * out_features,
            rank.expand_as(skipped),
        ),
        dim=2,
    )
    rows = pairs.rows * pairs.num_experts + pairs.experts
    rows = torch.where(pairs.rows == BASE_ROW, BASE_ROW, rows)
    return ExpertRows(weights.flat, table.view(-1, 1, 3), rows.to(torch.int32))


def plan_expert_tiles(pair_rows: Tensor, *, max_segments: int) -> Tensor:
    """int32 `[num_tiles, 3]`, as in `LoraTiles`: up to TILE_TOKENS adjacent pairs of one row each.

    pair_rows: see ExpertRows. max_segments: an upper bound of the runs of equal rows in it, because
    the actual number would need a synchronization; unused tiles have row -1.
    """
    num_pairs = pair_rows.shape[0]
    num_tiles = min(num_pairs, max_segments + num_pairs // TILE_TOKENS)
    index = torch.arange(num_pairs, device=pair_rows.device)
    is_first = torch.ones_like(index, dtype=torch.bool)
    is_first[1:] = pair_rows[1:] != pair_rows[:-1]
    segment_start = torch.where(is_first, index, 0).cummax(0).values
    is_start = (index - segment_start) % TILE_TOKENS == 0
    place = torch.where(is_start, is_start.cumsum(0) - 1, num_tiles)  # the last one is for the rest
    starts = index.new_full((num_tiles + 1,), num_pairs)
    starts.scatter_(0, place, torch.where(is_start, index, num_pairs))
    start, end = starts[:-1], starts[1:]
    row = torch.where(start < num_pairs, pair_rows[start.clamp(max=num_pairs - 1)], BASE_ROW)
    return torch.stack((start, end, row), dim=1).to(torch.int32)


def plan_expert_work(
    weights: AdapterWeights,
    slice_index: int,
    pairs: ExpertPairs,
    batch: LoraBatch,
    *,
    in_features: int,
    out_features: int,
    max_rank: int,
) -> tuple[ExpertRows, LoraTiles]:
    """The inputs with which the Triton kernels serve the pairs as tokens of a dense op."""
    experts = expert_rows(weights, slice_index, pairs, in_features, out_features)
    max_segments = (len(batch.adapter_rows) + 1) * pairs.num_experts
    tiles = plan_expert_tiles(experts.pair_rows, max_segments=max_segments)
    return experts, LoraTiles(tiles, max_rank)


def _add_on_gpu(
    x: Tensor,
    y: Tensor,
    weights: AdapterWeights,
    slice_index: int,
    pairs: ExpertPairs,
    batch: LoraBatch,
) -> None:
    from .lora_triton import add_tiles  # Triton is not installed everywhere

    assert batch.tiles is not None
    out_features = y.shape[1]
    experts, work = plan_expert_work(
        weights,
        slice_index,
        pairs,
        batch,
        in_features=x.shape[1],
        out_features=out_features,
        max_rank=batch.tiles.max_rank,
    )
    add_tiles(x, y, experts, experts.pair_rows, work, first_slice=0, slice_outs=(out_features,))


def _expert_matrix(flat: Tensor, offset: int, expert: int, rank: int, width: int) -> Tensor:
    """One expert's A or B of a slice whose matrices begin at `offset`: `[rank, width]`."""
    start = offset + expert * rank * width
    return flat[start : start + rank * width].view(rank, width)


def _check(x: Tensor, y: Tensor, weights: AdapterWeights, pairs: ExpertPairs) -> None:
    if not x.shape[0] == y.shape[0] == pairs.num_pairs:
        raise ValueError(f"{x.shape[0]} rows of x, {y.shape[0]} of y, {pairs.num_pairs} pairs")
    if not x.dtype == y.dtype == weights.flat.dtype:
        raise ValueError(f"x is {x.dtype}, y {y.dtype}, the arena {weights.flat.dtype}")
    if x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError("the rows of x and y must be dense")
