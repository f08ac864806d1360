"""LoRA on experts: every implementation compared with each pair's matrices, amid NaN."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from loraplex.adapters.layout import BaseLayout, Projection, Slice, SliceKind
from loraplex.kernels.expert_pairs import ExpertPairs, sort_pairs
from loraplex.kernels.lora_batch import (
    TILE_TOKENS,
    AdapterRun,
    LoraBatch,
    LoraBatchBuilder,
    LoraTiles,
)
from loraplex.kernels.lora_experts import (
    add_expert_segments,
    add_experts,
    add_experts_reference,
    expert_tiles,
)
from support.lora_weights import PoisonedWeights, assert_lora_close

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
NUM_EXPERTS, TOP_K = 5, 2
IN_FEATURES, OUT_FEATURES = 24, 33
SLICE_INDEX = 1
RANKS = (4, 1, 0, 7)
"""By table row; the third adapter does not touch the experts."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Step:
    """One MoE layer's pairs in a step of decodes and prefills by random adapters."""

    def __init__(self, num_tokens: int, *, dtype: torch.dtype = torch.float32) -> None:
        rng = random.Random(num_tokens)
        layout = BaseLayout(
            "base",
            (
                Projection((Slice("linear", IN_FEATURES, 8),)),
                Projection(
                    (Slice("experts", IN_FEATURES, OUT_FEATURES, SliceKind.EXPERTS, NUM_EXPERTS),)
                ),
            ),
        )
        self.weights = PoisonedWeights(layout, num_rows=len(RANKS) + 2, dtype=dtype)
        for row, rank in enumerate(RANKS):
            self.weights.put(row, {0: 3, SLICE_INDEX: rank} if rank else {0: 3})
        rows = [0, *(rng.randrange(-1, len(RANKS)) for _ in range(num_tokens - 1))]
        runs = [AdapterRun(1, row, 1) for row in rows]
        batch = LoraBatchBuilder(self.weights, torch.device("cpu")).build(
            runs, num_decodes=num_tokens // 2
        )
        assert batch is not None
        # As on CUDA, where tiles of tokens are planned too.
        tiles = LoraTiles(torch.empty(0, 3, dtype=torch.int32), max(RANKS))
        self.batch: LoraBatch = replace(batch, tiles=tiles)
        self.cpu_batch = batch
        chosen = [rng.sample(range(NUM_EXPERTS), TOP_K) for _ in range(num_tokens)]
        self.pairs = sort_pairs(
            torch.tensor(chosen), NUM_EXPERTS, batch.token_rows, num_rows=len(RANKS)
        )
        self.x = torch.randn(num_tokens, IN_FEATURES)[self.pairs.tokens].to(dtype)
        self.y = torch.randn(num_tokens * TOP_K, OUT_FEATURES).to(dtype)

    def add_tiles(self, module: ModuleType, pairs: ExpertPairs) -> Tensor:
        """What `lora_triton` makes of y, by the kernels of this copy of the module."""
        assert pairs.expert_rows is not None
        y = self.y.clone()
        module.add_tiles(
            self.x,
            y,
            self.weights,
            pairs.expert_rows,
            expert_tiles(pairs, self.batch),
            first_slice=SLICE_INDEX,
            slice_outs=(OUT_FEATURES,),
            num_experts=NUM_EXPERTS,
        )
        return y

    def expected(self) -> Tensor:
        """Pair by pair, from the matrices themselves."""
        y = self.y.clone()
        assert self.pairs.rows is not None
        places = zip(self.pairs.rows.tolist(), self.pairs.experts.tolist(), strict=True)
        for place, (row, expert) in enumerate(places):
            if row < 0 or not RANKS[row]:
                continue
            a, b = self.weights.matrices(row, SLICE_INDEX)
            rank = slice(expert * RANKS[row], (expert + 1) * RANKS[row])
            h = (self.x[place].float() @ a[rank].float().T).to(self.y.dtype)
            y[place] = (y[place].float() + h.float() @ b[rank].float()).to(self.y.dtype)
        return y


def test_pairs_are_sorted_by_expert_and_within_it_by_adapter() -> None:
    top_k_index = torch.tensor([[2, 0], [0, 1], [2, 1]])
    rows = torch.tensor([3, -1, 1], dtype=torch.int32)
    pairs = sort_pairs(top_k_index, 4, rows, num_rows=4)
    assert pairs.experts.tolist() == [0, 0, 1, 1, 2, 2]
    assert pairs.tokens.tolist() == [1, 0, 1, 2, 2, 0]
    assert pairs.rows is not None
    assert pairs.rows.tolist() == [-1, 3, -1, 1, 1, 3]
    assert top_k_index.reshape(-1)[pairs.order].tolist() == pairs.experts.tolist()
    assert pairs.host_ends == [2, 4, 6, 6]
    segments = [(part.start, part.end, part.expert, part.row) for part in pairs.segments]
    assert segments == [(1, 2, 0, 3), (3, 4, 1, 1), (4, 5, 2, 1), (5, 6, 2, 3)]


def test_pairs_without_adapters_have_no_rows_and_no_segments() -> None:
    pairs = sort_pairs(torch.tensor([[1, 0], [1, 2]]), 3)
    assert pairs.rows is None
    assert pairs.segments == ()
    assert pairs.experts.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 90])
def test_every_pair_gets_the_delta_of_its_own_adapter_in_its_own_expert(
    num_tokens: int, dtype: str
) -> None:
    step = Step(num_tokens, dtype=DTYPES[dtype])
    y = step.y.clone()
    add_experts(step.x, y, step.weights, SLICE_INDEX, step.pairs, step.cpu_batch)
    assert_lora_close(y, step.expected())


def test_the_reference_says_the_same() -> None:
    step = Step(50)
    y = step.y.clone()
    add_experts_reference(step.x, y, step.weights, SLICE_INDEX, step.pairs)
    assert_lora_close(y, step.expected())


@pytest.mark.parametrize("num_tokens", [1, 7, 90])
def test_tiles_of_experts_serve_the_same_through_the_dense_kernels(
    interpreted_lora: ModuleType, num_tokens: int
) -> None:
    step = Step(num_tokens)
    assert_lora_close(step.add_tiles(interpreted_lora, step.pairs), step.expected())


def test_tiles_reach_an_adapter_s_pairs_behind_those_of_the_base_in_every_expert() -> None:
    step = Step(2)
    pairs = sort_pairs(
        torch.arange(NUM_EXPERTS).expand(2, -1), NUM_EXPERTS, torch.tensor([-1, 0]), num_rows=1
    )
    batch = replace(step.batch, adapter_rows=frozenset({0}))
    work = expert_tiles(pairs, batch)
    tiles = [(start, end) for start, end, row in work.tiles.tolist() if row >= 0]
    assert tiles == [(place, place + 1) for place in range(1, 2 * NUM_EXPERTS, 2)]


def test_tiles_cover_each_pair_once_and_never_mix_adapters_or_experts() -> None:
    step = Step(200)
    work, expert_rows = expert_tiles(step.pairs, step.batch), step.pairs.expert_rows
    assert expert_rows is not None
    served: list[int] = []
    for start, end, row in work.tiles.tolist():
        if row >= 0:
            assert 0 < end - start <= TILE_TOKENS
            assert expert_rows[start:end].tolist() == [row] * (end - start)
            served += range(start, end)
    assert served == (expert_rows >= 0).nonzero().flatten().tolist()


def test_what_overflows_in_one_adapter_leaves_all_other_pairs_bit_equal() -> None:
    step = Step(60)
    before, after = step.y.clone(), step.y.clone()
    add_expert_segments(step.x, before, step.weights, SLICE_INDEX, step.pairs)
    for matrix in step.weights.matrices(0, SLICE_INDEX):
        matrix.fill_(1e38)
    add_expert_segments(step.x, after, step.weights, SLICE_INDEX, step.pairs)
    assert step.pairs.rows is not None
    mine = step.pairs.rows == 0
    assert not after[mine].isfinite().all()
    assert torch.equal(after[~mine], before[~mine])


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (torch.zeros(3, IN_FEATURES), torch.zeros(4, OUT_FEATURES), "3 rows of x"),
        (torch.zeros(4, IN_FEATURES).half(), torch.zeros(4, OUT_FEATURES), "x is torch.float16"),
        (torch.zeros(IN_FEATURES, 4).T, torch.zeros(4, OUT_FEATURES), "must be dense"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, y: Tensor, reason: str) -> None:
    step = Step(2)
    with pytest.raises(ValueError, match=reason):
        add_experts(x, y, step.weights, SLICE_INDEX, step.pairs, step.cpu_batch)
