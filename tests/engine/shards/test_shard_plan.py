"""The ranks' parts of a layer give the whole layer's result, as torch computes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.shards.rank_place import RankPlace
from loraplex.engine.shards.shard_plan import LinearSize, Shard, ShardPlan, ShardStyle, plan_shards

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


EXPERTS = "model.layers.0.mlp.experts"


def plan_all(
    num_ranks: int, *, num_experts: dict[str, int] | None = None, **changes: Any
) -> list[ShardPlan]:
    config = make_config(**changes)
    return [
        plan_shards(
            config, PREFIX, SIZES, RankPlace(rank, num_ranks), num_experts=num_experts or {}
        )
        for rank in range(num_ranks)
    ]


def plans(num_ranks: int, **changes: Any) -> list[dict[str, Shard]]:
    return [plan.linears for plan in plan_all(num_ranks, **changes)]


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


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_expert_is_held_by_one_rank(num_ranks: int) -> None:
    parts = [plan.experts[EXPERTS] for plan in plan_all(num_ranks, num_experts={EXPERTS: 8})]
    assert [expert for part in parts for expert in part] == list(range(8))
    assert {len(part) for part in parts} == {8 // num_ranks}


def test_experts_are_divided_though_no_linear_layer_is() -> None:
    plans = plan_all(2, num_experts={EXPERTS: 4}, base_model_tp_plan=None)
    assert [(plan.linears, plan.experts) for plan in plans] == [
        ({}, {EXPERTS: range(2)}),
        ({}, {EXPERTS: range(2, 4)}),
    ]


def test_the_heads_of_a_latent_attention_are_divided_and_its_latent_is_not() -> None:
    sizes = {
        "model.layers.0.self_attn.q_b_proj": LinearSize(24, 8 * HEAD_SIZE),
        "model.layers.0.self_attn.kv_a_proj_with_mqa": LinearSize(24, 10),
        "model.layers.0.self_attn.kv_b_proj": LinearSize(8, 8 * HEAD_SIZE),
    }
    plan = {
        "layers.*.self_attn.q_b_proj": "colwise",
        "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "layers.*.self_attn.kv_b_proj": "colwise",
    }
    config = make_config(base_model_tp_plan=plan)
    linears = plan_shards(config, PREFIX, sizes, RankPlace(1, 4), num_experts={}).linears
    heads = range(2 * HEAD_SIZE, 4 * HEAD_SIZE)
    assert {path.rpartition(".")[2]: shard.held.outputs for path, shard in linears.items()} == {
        "q_b_proj": heads,
        "kv_b_proj": heads,
    }
    with pytest.raises(UnsupportedModel, match="q_b_proj has 8 heads"):
        plan_shards(config, PREFIX, sizes, RankPlace(1, 16), num_experts={})


def test_a_family_that_transformers_has_no_plan_for_has_an_own_one() -> None:
    sizes = {
        f"model.h.0.{layer}": LinearSize(24, 48)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    config = make_config(model_type="gpt2", base_model_tp_plan=None)
    linears = plan_shards(config, PREFIX, sizes, RankPlace(0, 2), num_experts={}).linears
    assert {path: shard.style for path, shard in linears.items()} == {
        "model.h.0.mlp.c_fc": ShardStyle.COLUMN,
        "model.h.0.mlp.c_proj": ShardStyle.ROW,
    }


def test_the_styles_are_the_plans() -> None:
    styles = {path.rpartition(".")[2]: shard.style for path, shard in plans(2)[0].items()}
    assert styles["q_proj"] is styles["k_proj"] is ShardStyle.COLUMN
    assert styles["o_proj"] is ShardStyle.ROW
    assert styles["gate_up_proj"] is ShardStyle.GATHERED
    assert styles["down_proj"] is ShardStyle.SPLIT_ROW


@pytest.mark.parametrize(
    ("num_ranks", "changes", "reason"),
    [
        (2, {"num_experts": {EXPERTS: 3}}, "experts has 3 experts, which cannot be divided"),
        (2, {"base_model_tp_plan": None}, "it has no plan"),
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
