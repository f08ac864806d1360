"""CPU matmuls with few rows whose rounding does not depend on the number of rows.

In fp32, MKL sums a row's products in different orders for one row, for two or three, and for four
or more. So a token that decodes alone and is verified with draft tokens would differ in its last
bits, and a few layers amplify the difference tenfold. Therefore fewer than four rows are padded to
four.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_ROWS = 4
"""From this number of rows on, a row's sums do not depend on it."""


def enough_rows(x: Tensor) -> Tensor:
    """x `[..., n, k]`; in fp32 with at least `MIN_ROWS` rows, the last one repeated."""
    if x.dtype != torch.float32:
        return x
    if x.shape[-2] == 1:
        return x.expand(*x.shape[:-2], MIN_ROWS, -1)
    return repeat_last_row(x, MIN_ROWS)


def repeat_last_row(x: Tensor, num_rows: int) -> Tensor:
    """x `[..., n, k]` with its last row repeated up to `num_rows` rows; x itself if it has
    enough."""
    missing = num_rows - x.shape[-2]
    if missing <= 0:
        return x
    last = x[..., -1:, :].expand(*x.shape[:-2], missing, -1)
    return torch.cat([x, last], dim=-2)
