"""What the Triton kernels compute, tile by tile in plain PyTorch, where there is no Triton."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loraplex.kernels.expert_pairs import plain_sort_pairs
from loraplex.kernels.lora_batch import LoraTiles

from .expert_steps import ExpertKernels


def add_tiles(
    x: Tensor,
    y: Tensor,
    weights: Any,
    token_rows: Tensor,
    work: LoraTiles,
    *,
    first_slice: int,
    slice_outs: tuple[int, ...],
    num_experts: int = 1,
) -> None:
    """As the kernels of `lora_triton`."""
    for start, end, row in work.tiles.tolist():
        if row < 0:
            continue
        mine = [token for token in range(start, end) if token_rows[token] == row]
        adapter, expert = divmod(row, num_experts)
        column = 0
        for index, out in enumerate(slice_outs):
            a, b, rank = weights.table[adapter, first_slice + index].tolist()
            assert rank <= work.max_rank
            a, b = a + expert * rank * x.shape[1], b + expert * rank * out
            down = weights.flat[a : a + rank * x.shape[1]].view(rank, x.shape[1])
            up = weights.flat[b : b + rank * out].view(rank, out)
            y[mine, column : column + out] += x[mine] @ down.T @ up
            column += out


def multiply_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tensor, *, is_transposed: bool
) -> Tensor:
    """As the kernel of `grouped_linear_triton`."""
    y = torch.full((len(x), weight.shape[2 if is_transposed else 1]), torch.nan).to(x)
    for start, end, expert in tiles.tolist():
        if expert >= 0:
            matrix = weight[expert] if is_transposed else weight[expert].T
            y[start:end] = x[start:end] @ matrix
            if bias is not None:
                y[start:end] += bias[expert]
    return y


def plain_expert_kernels() -> ExpertKernels:
    """Stand-ins for the modules with the kernels of MoE layers."""
    return ExpertKernels(
        SimpleNamespace(sort_pairs=partial(plain_sort_pairs, is_tiled=True)),
        SimpleNamespace(multiply_tiles=multiply_tiles),
        SimpleNamespace(add_tiles=add_tiles),
    )
