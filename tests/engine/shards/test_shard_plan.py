"""The ranks' parts of a linear layer give the whole layer's result, as torch computes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.shards.rank_place import RankPlace
from loraplex.engine.shards.shard_plan import LinearSize, Shard, ShardStyle, plan_shards

HEAD_SIZE = 4
PREFIX = "model"
SIZES = {
    "model.layers.0.self_attn.q_proj": LinearSize(24, 8 * HEAD_SIZE),
    "model.layers.0.self_attn.k_proj": LinearSize(24, 2 * HEAD_SIZE),
    "model.layers.0.self_attn.o_proj": LinearSize(8 * HEAD_SIZE, 24),
    "model.layers.0.mlp.gate_up_proj": LinearSize(24, 32),
    "model.layers.0.mlp.down_proj": LinearSize(16, 24),
    "model.layers.0.mlp.router": LinearSize(24, 3),
}
PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_up_proj": "colwise_gather_output",
    "layers.*.mlp.down_proj": "rowwise_split_input",
}


def make_config(**changes: Any) -> SimpleNamespace:
    settings = {
        "model_type": "tiny",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "base_model_tp_plan": PLAN,
    }
    return SimpleNamespace(**{**settings, **changes})


def plans(num_ranks: int, **changes: Any) -> list[dict[str, Shard]]:
    config = make_config(**changes)
    return [
        plan_shards(config, PREFIX, SIZES, RankPlace(rank, num_ranks)) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("leaf", ["q_proj", "o_proj", "gate_up_proj", "down_proj"])
def test_the_parts_of_all_ranks_compute_what_the_whole_layer_does(
    leaf: str, num_ranks: int
) -> None:
    path = next(path for path in SIZES if path.endswith(leaf))
    size = SIZES[path]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size.out_features, size.in_features, generator=generator)
    x = torch.randn(3, size.in_features, generator=generator)
    shards = [plan[path] for plan in plans(num_ranks)]
    parts = []
    for _, (inputs, outputs) in shards:
        columns = slice(inputs.start, inputs.stop)
        own = weight[outputs.start : outputs.stop, columns]
        parts.append(x[:, columns] @ own.T)
    is_sum = shards[0].style.sums
    whole = torch.stack(parts).sum(dim=0) if is_sum else torch.cat(parts, dim=1)
    torch.testing.assert_close(whole, x @ weight.T)


@pytest.mark.parametrize(("num_ranks", "heads"), [(2, [0, 1]), (4, [0, 0, 1, 1])])
def test_each_rank_holds_the_kv_heads_that_its_query_heads_read(
    num_ranks: int, heads: list[int]
) -> None:
    num_queries, num_kv = 8, 2
    for rank, plan in enumerate(plans(num_ranks)):
        queries = plan["model.layers.0.self_attn.q_proj"].held.outputs
        keys = plan["model.layers.0.self_attn.k_proj"].held.outputs
        assert keys == range(heads[rank] * HEAD_SIZE, (heads[rank] + 1) * HEAD_SIZE)
        for query in range(queries.start // HEAD_SIZE, queries.stop // HEAD_SIZE):
            assert query // (num_queries // num_kv) == heads[rank]


def test_a_layer_outside_of_the_plan_is_held_whole() -> None:
    assert "model.layers.0.mlp.router" not in plans(2)[0]


def test_the_styles_are_the_plans() -> None:
    styles = {path.rpartition(".")[2]: shard.style for path, shard in plans(2)[0].items()}
    assert styles["q_proj"] is styles["k_proj"] is ShardStyle.COLUMN
    assert styles["o_proj"] is ShardStyle.ROW
    assert styles["gate_up_proj"] is ShardStyle.GATHERED
    assert styles["down_proj"] is ShardStyle.SPLIT_ROW


@pytest.mark.parametrize(
    ("num_ranks", "changes", "reason"),
    [
        (2, {"base_model_tp_plan": None}, "transformers has no plan"),
        (2, {"base_model_tp_plan": {"layers.*.attn.wq": "colwise"}}, "names none of"),
        (2, {"base_model_tp_plan": {"layers.*.mlp.router": "ep_router"}}, "router as ep_router"),
        (3, {}, "q_proj has 8 heads, which cannot be divided among 3 ranks"),
        (2, {"num_key_value_heads": 3}, "k_proj has 3 heads"),
        (
            5,
            {"base_model_tp_plan": {"layers.*.mlp.down_proj": "rowwise"}},
            "down_proj has 16 inputs",
        ),
    ],
)
def test_a_family_or_a_number_of_ranks_that_does_not_fit_is_refused_by_name(
    num_ranks: int, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        plans(num_ranks, **changes)
