"""A matrix whose rows are read when something is computed with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex.engine.model.row_matrix import RowMatrix, leave_as_rows, read_whole
from loraplex.kernels.bfloat16_linear_cpu import BFloat16PanelLinear
from loraplex.kernels.linear import Linear
from loraplex.kernels.linear_cpu import PanelLinear
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_weight import QuantizedWeight

CPU = torch.device("cpu")
ROWS, IN = 2_000, 512
MOST_NUMBERS = 1 << 17
TOKENS = torch.tensor([[3, 1_999, 3], [0, 7, 1_999]])


class Recorded:
    """Reads rows of random values in bf16, and remembers which."""

    def __init__(self) -> None:
        self.weight = torch.randn(ROWS, IN).bfloat16()
        self.read: list[range] = []

    def __call__(self, rows: range) -> Tensor:
        self.read.append(rows)
        return self.weight[rows.start : rows.stop]

    @property
    def largest(self) -> int:
        """The numbers that were read at a time."""
        return max(len(rows) for rows in self.read) * IN

    def matrix(self) -> RowMatrix:
        return RowMatrix.of(self, (ROWS, IN), torch.float32, CPU)


def test_a_lookup_reads_the_rows_of_its_tokens() -> None:
    recorded = Recorded()
    table = nn.Embedding(ROWS, IN)
    table.weight = nn.Parameter(recorded.matrix(), requires_grad=False)
    found = table(TOKENS)
    assert type(found) is Tensor
    assert torch.equal(found, recorded.weight.float()[TOKENS])
    assert recorded.read == [range(row, row + 1) for row in (0, 3, 7, 1_999)]


def test_products_are_those_of_the_whole_and_read_few_rows_at_a_time() -> None:
    recorded, x = Recorded(), torch.randn(2, 3, IN)
    layer = nn.Linear(IN, ROWS)
    expected = F.linear(x, recorded.weight.float(), layer.bias)
    layer.weight = nn.Parameter(recorded.matrix(), requires_grad=False)
    with torch.inference_mode():
        assert (layer(x) - expected).abs().max() < 1e-4
    assert recorded.largest <= MOST_NUMBERS
    assert [row for rows in recorded.read for row in rows] == list(range(ROWS))


def test_rows_of_rows_are_read_when_they_are_used() -> None:
    recorded = Recorded()
    part = recorded.matrix().of_rows(range(100, 1_000)).of_rows(range(10, 900))
    assert (part.shape, recorded.read) == ((890, IN), [])
    assert torch.equal(part[5:8], recorded.weight[115:118].float())
    assert torch.equal(part.whole(), recorded.weight[110:1_000].float())
    assert recorded.largest <= MOST_NUMBERS


@pytest.mark.parametrize(
    ("form", "dtype"), [(PanelLinear, torch.float32), (BFloat16PanelLinear, torch.bfloat16)]
)
def test_panels_are_packed_from_few_rows_at_a_time(
    form: Callable[[Tensor], Linear], dtype: torch.dtype
) -> None:
    recorded = Recorded()
    packed = form(RowMatrix.of(recorded, (ROWS, IN), dtype, CPU))
    assert recorded.largest <= MOST_NUMBERS
    for buffer, expected in zip(packed.buffers(), form(recorded.weight).buffers(), strict=True):
        assert torch.equal(buffer, expected)


def test_any_other_function_gets_the_whole_matrix() -> None:
    recorded = Recorded()
    doubled = recorded.matrix() * 2
    assert type(doubled) is Tensor
    assert torch.equal(doubled, recorded.weight.float() * 2)


def test_codes_are_dense_for_who_computes_and_stay_codes_as_they_are_stored() -> None:
    recorded = Recorded()
    codes = quantize(recorded.weight, WeightFormat.INT8)
    matrix = RowMatrix.of(
        lambda rows: codes.rows(rows.start, rows.stop), (ROWS, IN), torch.float32, CPU
    )
    assert torch.equal(matrix[:50], codes.dequantize()[:50])
    stored = matrix.stored(lambda values: values)
    assert isinstance(stored, QuantizedWeight)
    assert torch.equal(stored.codes, codes.codes)
    assert torch.equal(stored.scale, codes.scale)


def test_rows_may_be_quantized_as_they_are_read() -> None:
    recorded = Recorded()

    def codes(values: Tensor | QuantizedWeight) -> QuantizedWeight:
        assert isinstance(values, Tensor)
        return quantize(values, WeightFormat.INT4)

    stored = recorded.matrix().stored(codes)
    assert isinstance(stored, QuantizedWeight)
    assert torch.equal(stored.codes, codes(recorded.weight).codes)
    assert recorded.largest <= MOST_NUMBERS


def test_tied_modules_share_one_matrix_and_then_one_weight() -> None:
    recorded = Recorded()
    table, head, other = nn.Embedding(ROWS, IN), nn.Linear(IN, ROWS), nn.Linear(IN, 8)
    table.weight = head.weight = nn.Parameter(torch.empty(ROWS, IN, device="meta"))
    for module in (table, head):
        module.__dict__["row_reader"] = lambda: recorded
    modules, untouched = (table, head, other), other.weight
    leave_as_rows(modules, CPU)
    assert isinstance(table.weight, RowMatrix)
    assert head.weight is table.weight
    read_whole(modules)
    assert torch.equal(table.weight, recorded.weight.float())
    assert head.weight is table.weight
    assert other.weight is untouched
