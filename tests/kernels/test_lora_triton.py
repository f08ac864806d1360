"""The Triton kernels under the interpreter, against the reference, in memory full of NaN."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from loraplex.kernels.lora_batch import AdapterRun, LoraBatchBuilder, LoraTiles
from loraplex.kernels.lora_reference import add_lora_reference
from support.lora_weights import (
    POPULARITIES,
    PoisonedWeights,
    assert_lora_close,
    draw_rows,
    make_layout,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
RANKS = (1, 4, 7, 16, 64)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Case:
    """One projection of slices 1.. of a base, its adapters and one step's tokens."""

    def __init__(
        self,
        decode_rows: list[int],
        prefills: list[tuple[int, int]],
        *,
        in_features: int = 63,
        outs: tuple[int, ...] = (40, 17),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.outs = outs
        self.weights = PoisonedWeights(
            make_layout((8, (8,)), (in_features, outs)),
            num_rows=len(RANKS) + 1,
            dtype=dtype,
            capacity=1 << 19,
        )
        for row, rank in enumerate(RANKS):
            touched = range(1 + row % 2, 1 + len(outs))  # every other adapter skips a slice
            self.weights.put(row, dict.fromkeys(touched, rank))
        runs = [
            AdapterRun(num_tokens, row, 1)
            for num_tokens, row in [*((1, row) for row in decode_rows), *prefills]
        ]
        builder = LoraBatchBuilder(self.weights, torch.device("cpu"))
        self.tiles = builder.make_tiles(runs, num_decodes=len(decode_rows))
        rows = [run.row for run in runs for _ in range(run.num_tokens)]
        self.token_rows = torch.tensor(rows, dtype=torch.int32)
        self.x = torch.randn(len(rows), in_features).to(dtype)
        self.y = torch.randn(len(rows), sum(outs)).to(dtype)

    def run(self, module: ModuleType, tiles: LoraTiles | None = None) -> Tensor:
        result = self.y.clone()
        module.add_tiles(
            self.x,
            result,
            self.weights,
            self.token_rows,
            tiles or self.tiles,
            first_slice=1,
            slice_outs=self.outs,
        )
        return result

    def reference(self) -> Tensor:
        expected = self.y.clone()
        table = self.weights.table[:, 1:]
        add_lora_reference(
            self.x, expected, self.weights.flat, table, self.token_rows, slice_outs=self.outs
        )
        return expected


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_decodes", [1, 17])
def test_decode_equals_the_reference(
    interpreted_lora: ModuleType, popularity: str, num_decodes: int
) -> None:
    case = Case([0, *draw_rows(popularity, num_decodes - 1, len(RANKS))], [])
    assert_lora_close(case.run(interpreted_lora), case.reference())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_mixed_step_equals_the_reference(
    interpreted_lora: ModuleType, dtype: torch.dtype
) -> None:
    case = Case([2, -1, 4], [(3, -1), (5, 0), (19, 3), (1, 4)], dtype=dtype)
    assert_lora_close(case.run(interpreted_lora), case.reference())


@pytest.mark.parametrize(
    ("in_features", "outs"),
    [(133, (133,)), (16, (16, 16, 16)), (1, (1, 2)), (2100, (5,)), (64, (300, 16))],
    ids=str,
)
def test_any_size_of_projection_equals_the_reference(
    interpreted_lora: ModuleType, in_features: int, outs: tuple[int, ...]
) -> None:
    case = Case([1, 2, -1], [(20, 4)], in_features=in_features, outs=outs)
    assert_lora_close(case.run(interpreted_lora), case.reference())


def test_segments_longer_than_a_tile_equal_the_reference(interpreted_lora: ModuleType) -> None:
    case = Case([], [(70, 0), (65, 2)], in_features=20, outs=(20,))
    assert case.tiles.block_tokens == 64
    assert_lora_close(case.run(interpreted_lora), case.reference())


def test_rows_without_an_adapter_and_unused_tiles_are_left_alone(
    interpreted_lora: ModuleType,
) -> None:
    case = Case([-1, 3, -1], [(4, -1), (2, 2)])
    unused = torch.tensor([[0, 9, -1]] * 3, dtype=torch.int32)
    padded = replace(case.tiles, tiles=torch.cat([case.tiles.tiles, unused]))
    result = case.run(interpreted_lora, padded)
    assert torch.equal(result, case.run(interpreted_lora))
    base = case.token_rows == -1
    assert torch.equal(result[base], case.y[base])


@pytest.mark.parametrize("poison", [torch.inf, torch.nan, 3e38])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes the interpreted overflow
def test_overflow_of_one_adapter_leaves_all_other_rows_bit_identical(
    interpreted_lora: ModuleType, poison: float
) -> None:
    case = Case([3, 4, -1, 3, 0], [(3, 3), (4, 2), (2, -1)])
    own = case.token_rows == 3
    clean = case.run(interpreted_lora)
    case.x[own] = poison
    poisoned = case.run(interpreted_lora)
    assert torch.equal(poisoned[~own], clean[~own])
    assert not poisoned[own].isfinite().all()


def test_the_installed_kernels_are_not_the_interpreted_ones(interpreted_lora: ModuleType) -> None:
    from loraplex.kernels import lora_triton

    assert interpreted_lora.INTERPRETED
    assert not lora_triton.INTERPRETED
