"""Weights in lanes of 32 bits, as `cpu/lane_products.h` multiplies them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PANEL = 16
"""PANEL of `cpu/linear.h`."""
_PIECE_ROWS = 64
"""Rows that are packed at a time: a multiple of the panel."""
_LANE_BYTES = 4


def pack_lanes(weight: Tensor) -> Tensor:
    """`weight [out, in]` as `[ceil(out / 16), ceil(in / n), 16, n]` for n elements in a lane,
    padded with zeros. Reads no more of it than slices of a few rows at a time."""
    num_rows, in_features = weight.shape
    size = _LANE_BYTES // weight.dtype.itemsize
    num_lanes = -(-in_features // size)
    sizes = -(-num_rows // _PANEL), num_lanes, _PANEL, size
    packed = torch.empty(sizes, dtype=weight.dtype)
    for start in range(0, len(packed), _PIECE_ROWS // _PANEL):
        panels = packed[start : start + _PIECE_ROWS // _PANEL]
        rows = weight[start * _PANEL : (start + len(panels)) * _PANEL]
        whole = F.pad(rows, (0, -in_features % size, 0, len(panels) * _PANEL - len(rows)))
        panels.copy_(whole.view(len(panels), _PANEL, num_lanes, size).transpose(1, 2))
    return packed
