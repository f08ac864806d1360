from __future__ import annotations

import pytest
import torch

from loraplex.kernels.lora_batch import (
    TILE_TOKENS,
    AdapterRun,
    LoraBatchBuilder,
    Segment,
    plan_tiles,
)
from support.cpu_kernels import needs_cpu_library
from support.lora_weights import POPULARITIES, PoisonedWeights, draw_rows, make_layout


def make_weights(dtype: torch.dtype) -> PoisonedWeights:
    layout = make_layout((8, (8, 8)))
    weights = PoisonedWeights(layout, num_rows=8, dtype=dtype, capacity=1 << 12)
    weights.put(2, {0: 3, 1: 5})
    weights.put(7, {1: 1})
    return weights


@pytest.fixture
def weights() -> PoisonedWeights:
    return make_weights(torch.bfloat16)


@pytest.fixture
def builder(weights: PoisonedWeights) -> LoraBatchBuilder:
    return LoraBatchBuilder(weights, torch.device("cpu"))


@needs_cpu_library
def test_the_library_serves_every_token_by_its_row(builder: LoraBatchBuilder) -> None:
    runs = [AdapterRun(1, 2, 9), AdapterRun(1), AdapterRun(200, 7, 4), AdapterRun(2, 2, 9)]
    batch = builder.build(runs, num_decodes=2)
    assert batch is not None
    assert batch.token_rows.tolist() == [2, -1, *[7] * 200, 2, 2]
    assert batch.token_rows.dtype == torch.int32
    assert batch.segments == ()
    assert batch.adapter_rows == {2, 7}
    assert batch.max_rank == 5


@pytest.mark.usefixtures("without_cpu_library")
def test_without_a_library_all_are_segments(weights: PoisonedWeights) -> None:
    builder = LoraBatchBuilder(weights, torch.device("cpu"))
    runs = [AdapterRun(1), AdapterRun(1, 2, 9), AdapterRun(1, 2, 9), AdapterRun(3, 7, 4)]
    batch = builder.build(runs, num_decodes=3)
    assert batch is not None
    assert batch.segments == (Segment(1, 3, 2), Segment(3, 6, 7))


@needs_cpu_library
def test_the_library_serves_no_fp16() -> None:
    builder = LoraBatchBuilder(make_weights(torch.float16), torch.device("cpu"))
    batch = builder.build([AdapterRun(1, 2)], num_decodes=1)
    assert batch is not None
    assert batch.segments == (Segment(0, 1, 2),)


def test_a_step_of_base_tokens_has_no_batch(builder: LoraBatchBuilder) -> None:
    assert builder.build([AdapterRun(1), AdapterRun(30)], num_decodes=1) is None


@pytest.mark.usefixtures("without_cpu_library")
def test_adjacent_prompts_of_one_adapter_are_one_segment(weights: PoisonedWeights) -> None:
    builder = LoraBatchBuilder(weights, torch.device("cpu"))
    runs = [AdapterRun(4), AdapterRun(80, 2, 1), AdapterRun(70, 2, 1), AdapterRun(90, 7, 1)]
    batch = builder.build(runs, num_decodes=0)
    assert batch is not None
    assert batch.segments == (Segment(4, 154, 2), Segment(154, 244, 7))


def test_decoding_tokens_must_end_with_a_sequence(builder: LoraBatchBuilder) -> None:
    with pytest.raises(AssertionError, match="end where a run ends"):
        builder.make_tiles([AdapterRun(4, 2, 1)], num_decodes=3)


def test_max_rank_follows_the_adapters_of_the_step_and_their_generations(
    weights: PoisonedWeights, builder: LoraBatchBuilder
) -> None:
    def max_rank(*runs: AdapterRun) -> int:
        return builder.make_tiles(runs, num_decodes=len(runs)).max_rank

    low, high = AdapterRun(1, 7, 1), AdapterRun(1, 2, 1)
    assert max_rank(AdapterRun(1)) == 0
    assert max_rank(low, AdapterRun(1)) == 1
    assert max_rank(low, high) == 5
    weights.remove(7)
    weights.put(7, {0: 64})
    assert max_rank(AdapterRun(1, 7, 2), high) == 64


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_decodes", [0, 1, 15, 16, 17, 63, 64, 133])
def test_tiles_serve_every_adapter_token_exactly_once(popularity: str, num_decodes: int) -> None:
    decode_rows = draw_rows(popularity, num_decodes, 9)
    segments = [Segment(num_decodes + 3, num_decodes + 68, 1), Segment(num_decodes + 68, 210, 4)]
    token_rows = decode_rows + [-1] * 3 + [1] * 65 + [4] * (210 - num_decodes - 68)
    served: list[int] = []
    for start, end, row in plan_tiles(decode_rows, segments):
        assert 0 < end - start <= TILE_TOKENS
        own = [token for token in range(start, end) if token_rows[token] == row]
        assert own
        served += own
    assert sorted(served) == [token for token, row in enumerate(token_rows) if row != -1]


def test_names_all_tokens_of_adapters_that_hold_more_than_a_and_b(
    weights: PoisonedWeights, builder: LoraBatchBuilder
) -> None:
    weights.row_auxiliary[2] = {0: "something"}
    runs = [AdapterRun(1, 1), AdapterRun(1, 2), AdapterRun(1, 2), AdapterRun(4), AdapterRun(3, 2)]
    batch = builder.build(runs, num_decodes=3)
    assert batch is not None
    assert batch.auxiliary == (Segment(1, 3, 2), Segment(7, 10, 2))


def test_on_cuda_one_launch_applies_vectors_and_segments_the_rest(
    weights: PoisonedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraBatchBuilder, "_to_device", lambda _, values: torch.tensor(values))
    builder = LoraBatchBuilder(weights, torch.device("cuda"))
    plain, extended, replaced = AdapterRun(1, 7), AdapterRun(2, 1), AdapterRun(1, 2)
    weights.row_auxiliary[1] = weights.row_auxiliary[2] = {0: "something"}
    weights.replacing_rows.add(2)
    for runs, launches, segments in (
        ([plain], False, ()),
        ([plain, extended], True, ()),
        ([extended, replaced, plain], True, (Segment(2, 3, 2),)),
    ):
        batch = builder.build(runs, num_decodes=1 if runs[0] is plain else 2)
        assert batch is not None
        assert (batch.launches_vectors, batch.auxiliary) == (launches, segments)


def test_needs_are_the_highest_rank_and_whether_there_are_vectors_or_adapted_experts(
    weights: PoisonedWeights, builder: LoraBatchBuilder
) -> None:
    high, low, base = AdapterRun(2, 2), AdapterRun(1, 7), AdapterRun(3)
    assert builder.needs([base], elsewhere=[0]) == (0, False, False)
    assert builder.needs([low, base], elsewhere=[0]) == (1, False, False)
    assert builder.needs([low, high, low], elsewhere=[]) == (5, False, False)
    assert builder.needs([low, high], elsewhere=[0]) is None, "one changes slice 0"
    weights.row_auxiliary[7] = {1: "something"}
    assert builder.needs([low, high], elsewhere=[]) == (5, True, False)
    assert builder.needs([low, high], elsewhere=[], experts=[0]) == (5, True, True)
    assert builder.needs([low, base], elsewhere=[], experts=[0]) == (1, True, False)
    assert builder.needs([high, base], elsewhere=[]) == (5, False, False)
    weights.replacing_rows.add(7)
    assert builder.needs([low, high], elsewhere=[]) is None
    assert builder.needs([high, base], elsewhere=[]) == (5, False, False)


def test_a_slice_sees_only_the_adapters_that_touch_it(
    weights: PoisonedWeights, builder: LoraBatchBuilder
) -> None:
    touching, extended, foreign = 1, 2, 3
    weights.put(touching, {0: 4})
    weights.put(foreign, {1: 4})
    weights.put(extended, {1: 4})
    weights.row_auxiliary[extended] = {0: "something"}
    runs = [AdapterRun(1, row) for row in (foreign, touching, extended, -1, touching)]

    assert builder.segments_touching(0, runs) == (
        Segment(1, 2, touching),
        Segment(2, 3, extended),
        Segment(4, 5, touching),
    )
    batch = builder.build_touching(0, runs, num_decodes=5)
    assert batch is not None
    assert batch.token_rows.tolist() == [-1, touching, extended, -1, touching]
    assert batch.adapter_rows == {touching, extended}
    assert builder.build_touching(0, runs[:1], num_decodes=1) is None
