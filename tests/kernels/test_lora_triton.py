"""The Triton kernels in the interpreter, compared with the reference, in memory full of NaN."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from support.lora_steps import RANKS, LoraStep
from support.lora_weights import POPULARITIES, assert_lora_close, draw_rows

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_decodes", [1, 17])
def test_decode_equals_the_reference(
    interpreted_lora: ModuleType, popularity: str, num_decodes: int
) -> None:
    case = LoraStep([0, *draw_rows(popularity, num_decodes - 1, len(RANKS))], [])
    assert_lora_close(case.run(interpreted_lora), case.reference())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_mixed_step_equals_the_reference(
    interpreted_lora: ModuleType, dtype: torch.dtype
) -> None:
    case = LoraStep([2, -1, 4], [(3, -1), (5, 0), (19, 3), (1, 4)], dtype=dtype)
    assert_lora_close(case.run(interpreted_lora), case.reference())


@pytest.mark.parametrize(
    ("in_features", "outs"),
    [(133, (133,)), (16, (16, 16, 16)), (1, (1, 2)), (2100, (5,)), (64, (300, 16))],
    ids=str,
)
def test_any_size_of_projection_equals_the_reference(
    interpreted_lora: ModuleType, in_features: int, outs: tuple[int, ...]
) -> None:
    case = LoraStep([1, 2, -1], [(20, 4)], in_features=in_features, outs=outs)
    assert_lora_close(case.run(interpreted_lora), case.reference())


def test_segments_longer_than_a_tile_equal_the_reference(interpreted_lora: ModuleType) -> None:
    case = LoraStep([], [(70, 0), (65, 2)], in_features=20, outs=(20,))
    assert_lora_close(case.run(interpreted_lora), case.reference())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_shares_the_step_changes_no_bit_of_a_row(
    interpreted_lora: ModuleType, exact_products: None, dtype: torch.dtype
) -> None:
    # Requests of one adapter lie in one tile, or are cut elsewhere than when they are alone.
    decodes, prefills = [1, 4, -1, 3], [(5, 3), (19, 3), (1, 1), (33, 4)]
    step = LoraStep(decodes, prefills, in_features=140, outs=(40,), dtype=dtype)
    assert step.changed_alone(interpreted_lora) == []


def test_a_longer_prompt_of_a_higher_rank_changes_no_split_of_a_row(
    interpreted_lora: ModuleType, exact_products: None
) -> None:
    step = LoraStep([2], [(19, 4)], in_features=2100, outs=(17,), dtype=torch.bfloat16)
    assert step.changed_alone(interpreted_lora) == []


def test_a_prompt_of_19_tokens_changes_no_bit_of_a_decoding_row(
    interpreted_lora: ModuleType,
) -> None:
    step = LoraStep([1], [(19, 4)], in_features=300, dtype=torch.bfloat16)
    assert 0 not in step.changed_alone(interpreted_lora)


def test_rows_without_an_adapter_and_unused_tiles_are_left_alone(
    interpreted_lora: ModuleType,
) -> None:
    case = LoraStep([-1, 3, -1], [(4, -1), (2, 2)])
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
    case = LoraStep([3, 4, -1, 3, 0], [(3, 3), (4, 2), (2, -1)])
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
