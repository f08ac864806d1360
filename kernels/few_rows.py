"""Matmuls of few rows on the CPU, whose rounding would depend on how many rows there are.

In fp32 MKL adds up a row's products in one order where the row is alone, in others where there are
two or three, and in one more from four on. A token that decodes alone and is verified among guesses
would differ in its last bits, which a few layers make ten times as much. So fewer rows become four.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_ROWS = 4
"""From so many on, a row's sums do not depend on how many there are."""


def enough_rows(x: Tensor) -> Tensor:
    """x `[..., n, k]`; in fp32 with at least `MIN_ROWS` rows, the last one repeated."""
    if x.dtype != torch.float32:
        return x
    if x.shape[-2] == 1:
        return x.expand(*x.shape[:-2], MIN_ROWS, -1)
    return repeat_last_row(x, MIN_ROWS)


def repeat_last_row(x: Tensor, num_rows: int) -> Tensor:
    """x `[..., n, k]`, its last row repeated until there are so many; x itself if there are."""
    missing = num_rows - x.shape[-2]
    if missing <= 0:
        return x
    last = x[..., -1:, :].expand(*x.shape[:-2], missing, -1)
    return torch.cat([x, last], dim=-2)
