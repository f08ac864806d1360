"""One projection in mixed steps: decodes, prefills, base rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.lora import LoraProjection
from loraplex.kernels.lora_batch import AdapterRun, LoraBatch, LoraBatchBuilder
from loraplex.kernels.lora_reference import add_lora_reference
from support.cpu_kernels import needs_cpu_library, remove_cpu_library
from support.lora_weights import (
    POPULARITIES,
    PoisonedWeights,
    assert_lora_close,
    draw_rows,
    make_layout,
)

IN_FEATURES, OUTS = 40, (33, 7)
FIRST_SLICE = 2
RANKS = ({2: 4, 3: 4}, {2: 16}, {3: 7}, {0: 8, 2: 1, 3: 2})


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def weights(request: pytest.FixtureRequest) -> PoisonedWeights:
    return make_weights(request.param)


@pytest.fixture(params=[True, False], ids=["library", "segments"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are the CPU library's, or PyTorch's in segments."""
    if not request.param:
        remove_cpu_library(monkeypatch)


def make_weights(dtype: torch.dtype) -> PoisonedWeights:
    layout = make_layout((IN_FEATURES, (5, 5)), (IN_FEATURES, OUTS))
    weights = PoisonedWeights(layout, num_rows=len(RANKS), dtype=dtype, capacity=1 << 14)
    for row, ranks in enumerate(RANKS):
        weights.put(row, ranks)
    return weights


@pytest.fixture
def projection() -> LoraProjection:
    return LoraProjection(FIRST_SLICE, IN_FEATURES, OUTS)


def make_batch(
    weights: PoisonedWeights, decode_rows: list[int], prefills: list[tuple[int, int]]
) -> LoraBatch:
    """prefills: (num_tokens, row) each."""
    runs = [
        AdapterRun(num_tokens, row, weights.generations[row] if row >= 0 else 0)
        for num_tokens, row in [*((1, row) for row in decode_rows), *prefills]
    ]
    batch = LoraBatchBuilder(weights, torch.device("cpu")).build(runs, num_decodes=len(decode_rows))
    assert batch is not None
    return batch


def draw(weights: PoisonedWeights, num_tokens: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(num_tokens, IN_FEATURES), torch.randn(num_tokens, sum(OUTS))
    return x.to(weights.flat.dtype), y.to(weights.flat.dtype)


def reference(weights: PoisonedWeights, x: Tensor, y: Tensor, batch: LoraBatch) -> Tensor:
    expected = y.clone()
    add_lora_reference(
        x, expected, weights.flat, weights.table[:, 2:4], batch.token_rows, slice_outs=OUTS
    )
    return expected


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_decodes", [0, 1, 9])
def test_a_mixed_step_equals_the_reference(
    weights: PoisonedWeights, projection: LoraProjection, popularity: str, num_decodes: int
) -> None:
    decode_rows = draw_rows(popularity, num_decodes, len(RANKS))
    batch = make_batch(weights, decode_rows, [(3, -1), (5, 0), (2, 0), (17, 2), (1, 3), (90, 1)])
    x, y = draw(weights, len(batch.token_rows))
    result = y.clone()
    projection.add(x, result, weights, batch)
    assert_lora_close(result, reference(weights, x, y, batch))


def test_a_token_gets_the_same_delta_as_decode_and_as_prefill(
    weights: PoisonedWeights, projection: LoraProjection
) -> None:
    x, y = draw(weights, 1)
    as_decode, as_prefill = y.clone(), y.clone()
    projection.add(x, as_decode, weights, make_batch(weights, [0], []))
    projection.add(x, as_prefill, weights, make_batch(weights, [], [(1, 0)]))
    assert_lora_close(as_decode, as_prefill)


@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 3e38])
def test_overflow_of_one_adapter_leaves_all_other_rows_bit_identical(
    weights: PoisonedWeights, projection: LoraProjection, poison: float
) -> None:
    batch = make_batch(weights, [0, 1, -1, 2, 0], [(3, 0), (4, 2), (2, -1)])
    own = batch.token_rows == 0
    x, y = draw(weights, len(own))
    clean, poisoned = y.clone(), y.clone()
    projection.add(x, clean, weights, batch)
    x[own] = poison
    projection.add(x, poisoned, weights, batch)
    assert torch.equal(poisoned[~own], clean[~own])
    assert not poisoned[own].isfinite().all()


def test_matrices_are_read_in_every_step(
    weights: PoisonedWeights, projection: LoraProjection
) -> None:
    batch = make_batch(weights, [1, 0], [])
    x, y = draw(weights, 2)
    projection.add(x, y.clone(), weights, batch)
    weights.matrices(1, 2)[1].zero_()
    result = y.clone()
    projection.add(x, result, weights, batch)
    assert_lora_close(result, reference(weights, x, y, batch))
    assert torch.equal(result[0], y[0])


@needs_cpu_library
@pytest.mark.parametrize("library", [True], ids=["library"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_matrices_that_the_library_divides_give_the_reference_s_delta(dtype: torch.dtype) -> None:
    in_features, outs = 1_100, (2_600, 300)
    weights = PoisonedWeights(
        make_layout((in_features, outs)), num_rows=2, dtype=dtype, capacity=1 << 17
    )
    for row, ranks in enumerate([{0: 20, 1: 3}, {1: 5}]):
        weights.put(row, ranks)
    batch = make_batch(weights, [0, 1], [(70, 0), (3, 1)])
    x = torch.randn(75, in_features).to(dtype) / in_features**0.5
    y = torch.randn(75, sum(outs)).to(dtype)
    expected, result = y.clone(), y.clone()
    add_lora_reference(x, expected, weights.flat, weights.table, batch.token_rows, slice_outs=outs)
    LoraProjection(0, in_features, outs).add(x, result, weights, batch)
    assert_lora_close(result, expected)


@needs_cpu_library
@pytest.mark.parametrize("library", [True], ids=["library"], indirect=True)
def test_a_row_s_bits_do_not_depend_on_the_others_nor_on_threads(weights: PoisonedWeights) -> None:
    projection = LoraProjection(FIRST_SLICE, IN_FEATURES, OUTS)
    prefills = [(5, 0), (2, -1), (70, 3)]  # the library divides the last
    batch = make_batch(weights, [0, 2, 3], prefills)
    assert not batch.segments
    x, y = draw(weights, len(batch.token_rows))
    together = y.clone()
    projection.add(x, together, weights, batch)
    for token, row in enumerate(batch.token_rows.tolist()):
        if row >= 0:
            alone = y[token : token + 1].clone()
            lone = make_batch(weights, [row], [])
            projection.add(x[token : token + 1], alone, weights, lone)
            assert torch.equal(alone[0], together[token])
    torch.set_num_threads(2)
    again = y.clone()
    projection.add(x, again, weights, batch)
    assert torch.equal(again, together)


def test_writes_into_a_column_view_with_a_longer_row(
    weights: PoisonedWeights, projection: LoraProjection
) -> None:
    batch = make_batch(weights, [0, 3], [(4, 2)])
    x, y = draw(weights, 6)
    wide = torch.full((6, sum(OUTS) + 5), torch.nan, dtype=y.dtype)
    wide[:, 2:-3] = y
    projection.add(x, wide[:, 2:-3], weights, batch)
    assert_lora_close(wide[:, 2:-3], reference(weights, x, y, batch))
    assert wide[:, :2].isnan().all()
    assert wide[:, -3:].isnan().all()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(2, 40), torch.zeros(3, 40), r"x is \[2, 40\], not \[3, 40\]"),
        (torch.zeros(3, 41), torch.zeros(3, 40), r"x is \[3, 41\]"),
        (torch.zeros(3, 40), torch.zeros(3, 39), r"y is \[3, 39\], not \[3, 40\]"),
        (torch.zeros(3, 40).bfloat16(), torch.zeros(3, 40), "x is torch.bfloat16"),
        (torch.zeros(3, 40, device="meta"), torch.zeros(3, 40), "x is on meta"),
        (torch.zeros(40, 3).T, torch.zeros(3, 40), "dense"),
    ],
)
def test_refuses_tensors_that_do_not_fit(
    projection: LoraProjection, x: Tensor, y: Tensor, message: str
) -> None:
    weights = make_weights(torch.float32)
    with pytest.raises(ValueError, match=message):
        projection.add(x, y, weights, make_batch(weights, [0], [(2, 1)]))
