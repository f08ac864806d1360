"""GPTQ against rounding to the nearest, and against optimal brain surgery one column at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.engine.calibration.gptq import DAMPING, quantize_gptq
from loraplex.engine.calibration.grid import GRIDS, Grid, group_scales, round_to_nearest
from loraplex.engine.errors import NumericalError
from loraplex.kernels.quantized_weight import CodeType

INT4, FP8 = GRIDS[CodeType.INT4], GRIDS[CodeType.FP8]
GROUP = 16
FP32 = torch.float32
ORDERS = pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])


def make_inputs(num_rows: int, in_features: int, *, seed: int = 0) -> Tensor:
    """Correlated inputs of different sizes, as those of a layer are."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(num_rows, in_features // 4, generator=generator)
    mixing = torch.randn(in_features // 4, in_features, generator=generator)
    noise = torch.randn(num_rows, in_features, generator=generator)
    return (few @ mixing + noise) * torch.rand(in_features, generator=generator).exp()


def make_weight(out_features: int, in_features: int) -> Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(7))


def output_error(weight: Tensor, rounded: Tensor, inputs: Tensor) -> float:
    return float(((weight - rounded) @ inputs.T).norm() / (weight @ inputs.T).norm())


@ORDERS
@pytest.mark.parametrize("grid", [INT4, FP8], ids=["int4", "fp8"])
@pytest.mark.parametrize("group", [GROUP, 32, 96], ids=lambda group: f"group-{group}")
def test_the_output_error_is_less_than_that_of_the_nearest(
    grid: Grid, group: int, act_order: bool
) -> None:
    weight, inputs = make_weight(48, 96), make_inputs(400, 96)
    plain = round_to_nearest(weight, grid, group=group, dtype=FP32).dequantize()
    found = quantize_gptq(
        weight, inputs.T @ inputs, grid, group=group, dtype=FP32, act_order=act_order
    ).dequantize()
    assert output_error(weight, found, inputs) < 0.7 * output_error(weight, plain, inputs)


@ORDERS
def test_independent_inputs_are_rounded_to_the_nearest(act_order: bool) -> None:
    weight, sizes = make_weight(24, 64), torch.rand(64, generator=torch.Generator().manual_seed(1))
    plain = round_to_nearest(weight, INT4, group=GROUP, dtype=FP32)
    found = quantize_gptq(
        weight, torch.diag(sizes), INT4, group=GROUP, dtype=FP32, act_order=act_order
    )
    assert torch.equal(found.codes, plain.codes)
    assert torch.equal(found.scale, plain.scale)


@ORDERS
@pytest.mark.parametrize("group", [GROUP, 64], ids=["groups", "channel"])
def test_it_is_optimal_brain_surgery_one_column_at_a_time(group: int, act_order: bool) -> None:
    # In fp64, as a weight half way between two codes is rounded by the last bit of the sums.
    weight, inputs = make_weight(12, 64).double(), make_inputs(200, 64).double()
    hessian = inputs.T @ inputs
    found = quantize_gptq(weight, hessian, INT4, group=group, dtype=FP32, act_order=act_order)
    expected = surgery(weight, hessian, INT4, group=group, act_order=act_order)
    torch.testing.assert_close(found.dequantize(), expected)


def surgery(weight: Tensor, hessian: Tensor, grid: Grid, *, group: int, act_order: bool) -> Tensor:
    """Equations 2 and 3 of the paper in fp64, the inverse of what is left computed each time."""
    weight, in_features = weight.clone(), weight.shape[1]
    hessian = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(in_features)
    rounded = torch.empty_like(weight)
    left = list(range(in_features))
    scale = group_scales(weight, grid, group=group, dtype=FP32)
    if act_order:
        left.sort(key=lambda column: -float(hessian[column, column]))
    while left:
        column = left[0]
        if not act_order and column % group == 0:
            now = weight[:, column : column + group]
            scale[:, column // group] = grid.scales(now, FP32)
        own = scale[:, column // group].double()
        steps = (weight[:, column] / own).round().clamp(grid.lowest, grid.highest)
        rounded[:, column] = steps * own
        inverse = torch.linalg.inv(hessian[left][:, left])
        error = (weight[:, column] - rounded[:, column]) / inverse[0, 0]
        weight[:, left] -= torch.outer(error, inverse[0])
        left.pop(0)
    return rounded.float()


def test_inputs_that_are_always_zero_are_rounded_to_the_nearest() -> None:
    weight, inputs = make_weight(8, 64), make_inputs(100, 64)
    inputs[:, :GROUP] = 0
    found = quantize_gptq(weight, inputs.T @ inputs, INT4, group=GROUP, dtype=FP32, act_order=False)
    plain = round_to_nearest(weight, INT4, group=GROUP, dtype=FP32)
    assert torch.equal(found.codes[:, :GROUP], plain.codes[:, :GROUP])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_fewer_inputs_than_columns_are_enough(num_rows: int) -> None:
    weight, inputs = make_weight(8, 64), make_inputs(num_rows, 64)
    found = quantize_gptq(weight, inputs.T @ inputs, INT4, group=GROUP, dtype=FP32, act_order=True)
    assert output_error(weight, found.dequantize(), inputs) < 0.05


def test_inputs_that_are_not_finite_are_named() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        quantize_gptq(
            make_weight(4, 64),
            torch.full((64, 64), torch.inf),
            INT4,
            group=GROUP,
            dtype=FP32,
            act_order=True,
        )


def test_a_group_of_zeros_stays_zero() -> None:
    weight = make_weight(4, 32)
    weight[:, :GROUP] = 0
    found = round_to_nearest(weight, INT4, group=GROUP, dtype=torch.float16)
    assert not found.dequantize()[:, :GROUP].any()
    assert found.scale.isfinite().all()
