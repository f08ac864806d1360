"""GPTQ: rounds a weight column by column, and the later columns make up for each error.

Frantar et al. 2022 (arXiv 2210.17323). It makes the output error `‖(W - Q) X‖²` of calibration
inputs X small. What that needs of X is `H = X Xᵀ`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.quantized_weight import QuantizedWeight
from ..errors import NumericalError
from .grid import Grid, group_scales

DAMPING = 0.01
"""Added to H's diagonal, relative to its mean: the paper's value."""
_MAX_DAMPING = 1.0
_BLOCK = 128
"""Columns between two updates of all later columns: the paper's lazy batches."""


def quantize_gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    group: int,
    dtype: torch.dtype,
    act_order: bool,
    damping: float = DAMPING,
) -> QuantizedWeight:
    """Quantize `weight [out, in]`, fp32, for inputs with `hessian [in, in]`, fp32.

    Scales are stored as dtype, one for `group` inputs. `act_order` rounds the inputs with the
    largest `hessian` entry first. The scales then are those of the original weight, so that groups
    stay adjacent inputs. Without it they are those of the weight as updated when its group begins.
    Raises NumericalError if the hessian is not finite.
    """
    in_features = weight.shape[1]
    order = torch.arange(in_features, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    scale = group_scales(weight, grid, group=group, dtype=dtype)
    root = _inverse_root(hessian[order][:, order], damping)
    weight = weight[:, order]
    numbers = torch.empty_like(weight)
    block = group if not act_order and group < in_features else _BLOCK
    for start in range(0, in_features, block):
        columns = slice(start, start + block)
        if start and block == group and not act_order:
            scale[:, start // group] = grid.scales(weight[:, columns], dtype)
        rounded, errors = _round_block(
            weight[:, columns], root[columns, columns], scale[:, order[columns] // group], grid
        )
        numbers[:, order[columns]] = rounded
        weight[:, start + block :] -= errors @ root[columns, start + block :]
    return grid.quantized(numbers, scale, group=group, dtype=dtype)


def _round_block(weight: Tensor, root: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The numbers of a block's columns, and the errors that the columns after it make up for.

    `weight` and `scale [out, block]`; `root [block, block]`, upper triangular.
    """
    left, scale = weight.T.contiguous(), scale.T.contiguous()  # one column adjacent in memory
    numbers, errors = torch.empty_like(left), torch.empty_like(left)
    for column in range(len(left)):
        numbers[column] = grid.nearest(left[column], scale[column])
        errors[column] = (left[column] - numbers[column] * scale[column]) / root[column, column]
        left[column + 1 :].addr_(root[column, column + 1 :], errors[column], alpha=-1)
    return numbers.T, errors.T


def _inverse_root(hessian: Tensor, damping: float) -> Tensor:
    """The upper triangular U with `Uᵀ U = H⁻¹`, H damped.

    With `H = M Mᵀ`, M upper triangular, U is `M⁻¹`; M is the Cholesky factor of H read backwards.
    """
    if not bool(hessian.isfinite().all()):
        raise NumericalError("the calibration text gives the model activations that are not finite")
    diagonal = hessian.diagonal()
    while True:
        # An input that is always 0 takes no part: it is rounded to the nearest.
        added = torch.where(diagonal == 0, 1.0, damping * diagonal.mean())
        damped = hessian + torch.diag(added)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            break
        if damping > _MAX_DAMPING:
            raise NumericalError("the inputs of a layer are too large for fp32")
        damping *= 10
    upper = lower.flip(0, 1)
    identity = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    root: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return root
