"""The reference of the LoRA op in plain PyTorch, which every faster implementation must match.

For each token t of adapter row p, and each slice s of the projection that p changes:

    h = round(x[t] @ A[p, s].T)
    y[t, columns of s] = round(y[t, columns of s] + h @ B[p, s])

with both sums in fp32 (fp64 for fp64 tensors) and `round` to the serving dtype. Tokens are selected
by index, never multiplied by a mask, so overflow in one adapter's tokens cannot reach another's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_lora_reference(
    x: Tensor,
    y: Tensor,
    flat: Tensor,
    table: Tensor,
    token_rows: Tensor,
    *,
    slice_outs: tuple[int, ...],
) -> None:
    """Add each token's LoRA delta of one projection to the base result, in place.

    x: `[num_tokens, in_features]`; y: `[num_tokens, sum(slice_outs)]`, the base result.
    flat: `[capacity]`; table: int64 `[num_rows, len(slice_outs), 3]`: see `lora_weights`.
    token_rows: int `[num_tokens]`: each token's table row, -1 for the base model.
    """
    for row in set(token_rows.tolist()):
        if row >= 0:
            tokens = (token_rows == row).nonzero().flatten()
            _add_adapter(x, y, flat, table[row].tolist(), tokens, slice_outs)


def _add_adapter(
    x: Tensor,
    y: Tensor,
    flat: Tensor,
    entries: list[list[int]],
    tokens: Tensor,
    slice_outs: tuple[int, ...],
) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    start = 0
    for (a_offset, b_offset, rank), out_features in zip(entries, slice_outs, strict=True):
        if rank:
            a = flat.narrow(0, a_offset, rank * x.shape[1]).view(rank, -1).to(wide)
            b = flat.narrow(0, b_offset, rank * out_features).view(rank, -1).to(wide)
            h = (x[tokens].to(wide) @ a.T).to(x.dtype)  # [tokens, rank]
            columns = slice(start, start + out_features)
            y[tokens, columns] = (y[tokens, columns].to(wide) + h.to(wide) @ b).to(y.dtype)
        start += out_features
