"""The numbers that codes stand for, before scales: integers, or e4m3 floats."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.quantized_weight import CodeType, QuantizedWeight


class Grid(NamedTuple):
    """Numbers around 0, without zero points."""

    code_type: CodeType
    lowest: float
    highest: float
    reach: float
    """A group's largest weight becomes this number, or the nearest one that there is.

    Of n bits it is half way between the highest integer and the one above it, as in
    compressed-tensors: its rounding costs as much as that of any other weight.
    """

    def scales(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """fp32 `[out]` of `weight [out, group]`: numbers that dtype can hold, all above 0."""
        scale = (weight.abs().amax(dim=1) / self.reach).to(dtype).float()
        return torch.where(scale > 0, scale, 1.0)

    def nearest(self, weight: Tensor, scale: Tensor) -> Tensor:
        """fp32: the nearest number to each of `weight / scale`."""
        steps = (weight / scale).clamp(self.lowest, self.highest)
        if self.code_type is CodeType.FP8:
            return steps.to(torch.float8_e4m3fn).float()
        return steps.round()

    def quantized(
        self, numbers: Tensor, scale: Tensor, *, group: int, dtype: torch.dtype
    ) -> QuantizedWeight:
        """The weight of `numbers [out, in]` and `scale [out, groups]`, which is stored as dtype."""
        if self.code_type is CodeType.FP8:
            codes = numbers.to(torch.float8_e4m3fn).view(torch.int8)
        else:
            codes = numbers.to(torch.int8)
        return QuantizedWeight(self.code_type, codes, scale.to(dtype), group)


GRIDS = {
    grid.code_type: grid
    for grid in (
        Grid(CodeType.INT4, -8, 7, 7.5),
        Grid(CodeType.INT8, -128, 127, 127.5),
        Grid(CodeType.FP8, -448, 448, 448),
    )
}


def group_scales(weight: Tensor, grid: Grid, *, group: int, dtype: torch.dtype) -> Tensor:
    """fp32 `[out, groups]` of `weight [out, in]`."""
    return torch.stack([grid.scales(part, dtype) for part in weight.split(group, dim=1)], dim=1)


def round_to_nearest(
    weight: Tensor, grid: Grid, *, group: int, dtype: torch.dtype
) -> QuantizedWeight:
    """Each of `weight [out, in]` on its own; scales are stored as dtype, one for `group` inputs."""
    scale = group_scales(weight, grid, group=group, dtype=dtype)
    by_column = scale.repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    return grid.quantized(grid.nearest(weight, by_column), scale, group=group, dtype=dtype)
