"""The LoRA op on the experts of an MoE layer: each expert's linear map has its own A and B.

For each pair p (see `expert_pairs`) of expert e and adapter row w, where w changes the slice:

    h = round(x[p] @ A[w, e].T)
    y[p] = round(y[p] + h @ B[w, e])

with the arithmetic of `lora_reference`. A slice's A is `[experts, rank, in]` and its B, transposed,
`[experts, rank, out]`: the matrices of an expert begin `expert × rank × width` elements further on
than the table says. On CUDA the kernels of the dense op serve pairs by that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .expert_pairs import ExpertPairs, plan_run_tiles
from .lora_batch import LoraBatch, LoraTiles
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
    if pairs.expert_rows is None:
        return
    if batch.tiles is None:
        add_expert_segments(x, y, weights, slice_index, pairs)
    else:
        _add_on_gpu(x, y, weights, slice_index, pairs, batch)


def add_experts_reference(
    x: Tensor, y: Tensor, weights: AdapterWeights, slice_index: int, pairs: ExpertPairs
) -> None:
    """The meaning of `add_experts` in plain PyTorch; its arguments."""
    assert pairs.expert_rows is not None
    a_offset, b_offset, rank = weights.table[:, slice_index, :, None].unbind(1)  # [num_rows, 1]
    skipped = rank * torch.arange(pairs.num_experts, device=rank.device)  # [num_rows, experts]
    table = torch.stack(
        (
            a_offset + skipped * x.shape[1],
            b_offset + skipped * y.shape[1],
            rank.expand_as(skipped),
        ),
        dim=2,
    )
    add_lora_reference(
        x, y, weights.flat, table.view(-1, 1, 3), pairs.expert_rows, slice_outs=(y.shape[1],)
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


def expert_tiles(pairs: ExpertPairs, batch: LoraBatch) -> LoraTiles:
    """The step's tiles, with which the Triton kernels serve the pairs as tokens of a dense op."""
    assert batch.tiles is not None
    assert pairs.expert_rows is not None
    if pairs.tiles is None:
        max_runs = (len(batch.adapter_rows) + 1) * pairs.num_experts
        tiles = plan_run_tiles(pairs.expert_rows, max_runs=max_runs)
    else:
        assert pairs.tiles.lora is not None
        tiles = pairs.tiles.lora
    return LoraTiles(tiles, batch.tiles.max_rank)


def _add_on_gpu(
    x: Tensor,
    y: Tensor,
    weights: AdapterWeights,
    slice_index: int,
    pairs: ExpertPairs,
    batch: LoraBatch,
) -> None:
    from .lora_triton import add_tiles  # Triton is not installed everywhere

    assert pairs.expert_rows is not None
    add_tiles(
        x,
        y,
        weights,
        pairs.expert_rows,
        expert_tiles(pairs, batch),
        first_slice=slice_index,
        slice_outs=(y.shape[1],),
        num_experts=pairs.num_experts,
    )


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
