"""The reference compared with the definition of LoRA, token by token in fp64."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.lora_reference import add_lora_reference
from support.lora_weights import PoisonedWeights, make_layout

OUTS = (20, 7, 13)


def make_weights(dtype: torch.dtype = torch.float32) -> PoisonedWeights:
    weights = PoisonedWeights(make_layout((33, OUTS)), num_rows=3, dtype=dtype, capacity=1 << 14)
    weights.put(0, {0: 4, 1: 1, 2: 7})
    weights.put(1, {1: 16})
    return weights


def apply(
    weights: PoisonedWeights, x: torch.Tensor, y: torch.Tensor, rows: list[int]
) -> torch.Tensor:
    result = y.clone()
    add_lora_reference(x, result, weights.flat, weights.table, torch.tensor(rows), slice_outs=OUTS)
    return result


def test_adds_b_times_a_times_x_of_each_tokens_own_adapter() -> None:
    weights = make_weights(torch.float64)
    rows = [1, 0, -1, 0, 1]
    x, y = torch.randn(5, 33, dtype=torch.float64), torch.randn(5, 40, dtype=torch.float64)
    expected = []
    for token, row in enumerate(rows):
        parts = []
        for index, part in enumerate(y[token].split(OUTS)):
            if row >= 0 and int(weights.table[row, index, 2]):
                a, b = weights.matrices(row, index)
                part = part + b.T @ (a @ x[token])
            parts.append(part)
        expected.append(torch.cat(parts))
    torch.testing.assert_close(apply(weights, x, y, rows), torch.stack(expected))


def test_leaves_base_rows_and_untouched_slices_bit_identical() -> None:
    weights = make_weights()
    x, y = torch.randn(3, 33), torch.randn(3, 40)
    result = apply(weights, x, y, [-1, 1, -1])
    assert torch.equal(result[[0, 2]], y[[0, 2]])
    assert torch.equal(result[1, :20], y[1, :20])
    assert not torch.equal(result[1, 20:27], y[1, 20:27])
    assert torch.equal(result[1, 27:], y[1, 27:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_fp32_and_rounds_h_and_y_once(dtype: torch.dtype) -> None:
    weights = make_weights(dtype)
    x, y = torch.randn(1, 33).to(dtype), torch.randn(1, 40).to(dtype)
    a, b = weights.matrices(1, 1)
    h = (x.float() @ a.float().T).to(dtype)
    expected = (y[:, 20:27].float() + h.float() @ b.float()).to(dtype)
    assert torch.equal(apply(weights, x, y, [1])[:, 20:27], expected)
