"""The Triton kernels of MoE layers in the interpreter: pairs, base matmul and LoRA."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch

from loraplex.kernels.expert_pairs import plain_sort_pairs
from loraplex.kernels.lora_batch import TILE_TOKENS
from support.expert_steps import RANKS, ExpertKernels, ExpertStep
from support.lora_weights import assert_lora_close

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
NUM_EXPERTS = 5


@pytest.fixture
def kernels(
    interpreted_expert_pairs: ModuleType,
    interpreted_grouped_linear: ModuleType,
    interpreted_lora: ModuleType,
) -> ExpertKernels:
    return ExpertKernels(interpreted_expert_pairs, interpreted_grouped_linear, interpreted_lora)


def drawn(num_tokens: int, top_k: int, *, num_experts: int = NUM_EXPERTS) -> list[list[int]]:
    """Of random experts, of which the last is never chosen."""
    rng = random.Random(num_tokens)
    return [rng.sample(range(num_experts - 1), top_k) for _ in range(num_tokens)]


def make_step(chosen: list[list[int]], **options: Any) -> ExpertStep:
    rng = random.Random(1)
    rows = [3, *(rng.randrange(-1, len(RANKS)) for _ in chosen[1:])]
    sizes = {"num_experts": NUM_EXPERTS, "in_features": 24, "out_features": 37}
    return ExpertStep(chosen, rows, **{**sizes, **options})


ROUTINGS = {
    "one token": drawn(1, 2),
    "two of the experts": drawn(21, 2),
    "one of the experts": drawn(9, 1),
    "four of the experts": drawn(20, 4),
    "one expert takes all": [[2]] * 35,
    "a multiple of the tile": [[1, 3]] * (2 * TILE_TOKENS),
}


@pytest.mark.parametrize("has_rows", [True, False], ids=["adapters", "base"])
@pytest.mark.parametrize("chosen", ROUTINGS.values(), ids=ROUTINGS)
def test_pairs_and_their_tiles_are_those_that_are_defined(
    interpreted_expert_pairs: ModuleType, chosen: list[list[int]], has_rows: bool
) -> None:
    step = make_step(chosen)
    given = (step.top_k_index, NUM_EXPERTS, step.token_rows if has_rows else None, len(RANKS))
    ours = interpreted_expert_pairs.sort_pairs(*given)
    theirs = plain_sort_pairs(*given, is_tiled=True)
    assert ours.tiles is not None
    assert theirs.tiles is not None
    for name in ("order", "tokens", "experts", "expert_rows"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=0)
    for name in ("base", "lora"):
        work, defined = getattr(ours.tiles, name), getattr(theirs.tiles, name)
        assert (work is None) == (defined is None)
        if work is not None:
            assert work.dtype is torch.int32
            assert work[work[:, 2] >= 0].tolist() == defined[defined[:, 2] >= 0].tolist()


def test_the_number_of_tiles_depends_on_the_number_of_pairs_alone(
    interpreted_expert_pairs: ModuleType,
) -> None:
    sizes = set()
    for chosen in (drawn(35, 1), [[2]] * 35, [[0]] * 34 + [[4]]):
        tiles = make_step(chosen).sort(interpreted_expert_pairs).tiles
        assert tiles is not None
        assert tiles.lora is not None
        sizes.add((len(tiles.base), len(tiles.lora)))
    assert sizes == {(34 // TILE_TOKENS + NUM_EXPERTS, 35)}


@pytest.mark.parametrize("chosen", ROUTINGS.values(), ids=ROUTINGS)
def test_each_choice_meets_the_matrices_of_its_expert_and_adapter(
    kernels: ExpertKernels, chosen: list[list[int]]
) -> None:
    step = make_step(chosen)
    assert_lora_close(step.run(kernels), step.defined())


@pytest.mark.parametrize(
    ("dtype", "is_transposed", "has_bias"),
    [
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.float16, False, True),
        (torch.float16, True, False),
    ],
    ids=str,
)
def test_half_types_both_orders_of_storage_and_biases_are_served(
    kernels: ExpertKernels, dtype: torch.dtype, is_transposed: bool, has_bias: bool
) -> None:
    step = make_step(
        drawn(5, 2),
        in_features=150,  # more than a block, as the outputs
        out_features=80,
        dtype=dtype,
        is_transposed=is_transposed,
        has_bias=has_bias,
    )
    assert_lora_close(step.run(kernels), step.defined())


def test_what_shares_the_step_changes_no_bit_of_a_token(
    kernels: ExpertKernels, exact_products: None
) -> None:
    step = make_step(drawn(9, 2), dtype=torch.bfloat16, has_bias=True)
    assert step.changed_alone(kernels) == []


def test_a_token_or_expert_that_is_not_finite_changes_no_other_result(
    kernels: ExpertKernels,
) -> None:
    step = make_step(drawn(12, 2))
    clean = step.run(kernels)
    step.x[3] = torch.nan
    step.weight[1] = torch.nan
    dirty = step.run(kernels)
    own = (torch.arange(len(clean)) // 2 == 3) | (step.top_k_index.flatten() == 1)
    assert torch.equal(dirty[~own], clean[~own])
    assert dirty[own].isnan().all()


def test_rows_that_are_not_dense_are_refused(kernels: ExpertKernels) -> None:
    tiles = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be dense"):
        kernels.linear.multiply_tiles(
            torch.zeros(4, 6),
            torch.zeros(2, 6, 8).transpose(1, 2),
            None,
            tiles,
            is_transposed=False,
        )
