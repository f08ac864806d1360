"""Layers are divided among stages in their order, as equally as possible."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.shards.rank_place import GroupShape, RankPlace, StagePlace
from loraplex.engine.shards.stage_plan import StagePlan


@given(num_layers=st.integers(1, 130), num_stages=st.integers(1, 9))
def test_the_stages_have_all_layers_in_order_and_none_has_two_more(
    num_layers: int, num_stages: int
) -> None:
    plan = StagePlan("model.layers", num_layers, num_stages)
    stages = [plan.layers(stage) for stage in range(num_stages)]
    assert list(chain.from_iterable(stages)) == list(range(num_layers))
    sizes = list(map(len, stages))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    for layer in range(num_layers):
        assert layer in stages[plan.stage_of_layer(layer)]


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.7.self_attn.q_proj", 7),
        ("model.layers.12", 12),
        ("model.embed_tokens", None),
        ("model.layers_of_others.3.q_proj", None),
        ("lm_head", None),
    ],
)
def test_a_module_belongs_to_the_layer_that_its_path_names(path: str, layer: int | None) -> None:
    assert StagePlan("model.layers", 16, 2).layer_of(path) == layer


def test_rank_0_is_the_first_rank_of_the_last_stage() -> None:
    shape = GroupShape(2, 3)
    assert shape.size == 6
    assert [shape.stage(rank).stage for rank in range(6)] == [2, 2, 1, 1, 0, 0]
    assert [shape.place(rank) for rank in range(6)] == [RankPlace(0, 2), RankPlace(1, 2)] * 3
    assert shape.stage(0) == StagePlace(2, 3)
    assert shape.stage(0).is_last
    assert shape.stage(5).is_first
