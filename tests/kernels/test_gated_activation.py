"""The gated activation against transformers' own, and its kernel in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from loraplex.kernels.gated_activation import (
    Activation,
    gated_activation,
    plain_gated_activation,
)
from support.cpu_kernels import needs_cpu_library

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in (exp|cast):RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",  # Triton 3.6's interpreter
)
NAMES = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_pytorch_tanh"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXTREMES = torch.tensor([0.0, -0.0, 100.0, -100.0, 6e4, -6e4, 1e-7])


def draw(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two slices of a projection's output, with gates that overflow an exponential."""
    projected = 4 * torch.randn(1, num_rows, 2 * width)
    projected[..., : len(EXTREMES)] = EXTREMES
    gate, up = projected.to(dtype).split(width, dim=-1)
    return gate, up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation, ids=lambda activation: activation.name)
def test_equals_that_of_transformers_to_the_bit(activation: Activation, dtype: torch.dtype) -> None:
    for num_rows in (1, 5, 40):
        gate, up = draw(num_rows, 100, dtype)
        before = gate.clone(), up.clone()
        expected = ACT2FN[NAMES[activation]](gate) * up
        assert torch.equal(plain_gated_activation(gate, up, activation), expected)
        assert torch.equal(gate, before[0])
        assert torch.equal(up, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", Activation, ids=lambda activation: activation.name)
def test_the_kernel_computes_what_is_defined(
    interpreted_gated_activation: ModuleType, activation: Activation, dtype: torch.dtype
) -> None:
    for width in (16, 100, 1030):
        gate, up = draw(3, width, dtype)
        compute = interpreted_gated_activation.gated_activation
        ours = compute(gate, up, activation)
        expected = plain_gated_activation(gate, up, activation)
        rounding = 1e-6 if dtype is torch.float32 else 2.0**-10
        # Near -5, 1 + tanh has few digits left in the definition.
        torch.testing.assert_close(ours, expected, rtol=rounding, atol=1e-5)
        strided = [tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in (gate, up)]
        assert torch.equal(
            interpreted_gated_activation.gated_activation(*strided, activation), ours
        )


@needs_cpu_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", Activation, ids=lambda activation: activation.name)
def test_the_library_computes_what_is_defined(activation: Activation, dtype: torch.dtype) -> None:
    for width in (7, 16, 100, 1030):
        gate, up = draw(40, width, dtype)
        before = gate.clone(), up.clone()
        ours = gated_activation(gate, up, activation)
        expected = plain_gated_activation(gate, up, activation)
        rounding = 1e-6 if dtype is torch.float32 else 2.0**-7
        torch.testing.assert_close(ours, expected, rtol=rounding, atol=1e-5)
        wide_gate, wide_up = (tensor.repeat_interleave(2, dim=-1) for tensor in (gate, up))
        strided = gated_activation(wide_gate[..., ::2], wide_up[..., ::2], activation)
        assert torch.equal(strided, ours)
        assert torch.equal(gated_activation(gate[:, 3:4], up[:, 3:4], activation), ours[:, 3:4])
        torch.set_num_threads(2)
        assert torch.equal(gated_activation(gate, up, activation), ours)
        torch.set_num_threads(1)
        assert torch.equal(gate, before[0])
        assert torch.equal(up, before[1])


@needs_cpu_library
def test_what_is_not_finite_stays_in_its_place() -> None:
    gate, up = torch.ones(2, 40), torch.ones(2, 40)
    gate[0, 3], gate[1, 37], up[0, 20] = torch.nan, torch.inf, torch.nan
    ours = gated_activation(gate, up, Activation.SILU)
    expected = plain_gated_activation(gate, up, Activation.SILU)
    torch.testing.assert_close(ours, expected, equal_nan=True)
