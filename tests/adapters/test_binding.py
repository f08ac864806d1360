from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.added_tokens import MAX_ADDED_TOKENS
from loraplex.adapters.binding import bind
from loraplex.adapters.block import Extra, ExtraKind
from loraplex.adapters.bound import Binding
from loraplex.adapters.classification import MAX_LABELS
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.layout import BaseLayout, Halves, Projection, Slice, SliceKind
from loraplex.adapters.peft_config import MAX_RANK, PeftConfig
from loraplex.adapters.rejections import REJECTIONS
from loraplex.adapters.safetensors_header import TensorEntry
from loraplex.adapters.tensor_names import TensorRole

EMBEDDING, HEAD = "embed_tokens", "lm_head"
Q, V, DOWN = "layers.0.attn.q_proj", "layers.0.attn.v_proj", "layers.0.mlp.down_proj"
ROUTER, EXPERTS = "layers.1.mlp.gate", "layers.1.mlp.experts"
GATE_UP, EXPERT_DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
LAYOUT = BaseLayout(
    "base",
    (
        Projection((Slice(EMBEDDING, 99, 8, SliceKind.EMBEDDING),)),
        Projection((Slice(Q, 8, 8), Slice(V, 8, 4))),
        Projection((Slice(DOWN, 16, 8),)),
        Projection((Slice(ROUTER, 8, 3),)),
        Projection((Slice(GATE_UP, 8, 10, SliceKind.EXPERTS, 3, halves=Halves.JOINED),)),
        Projection((Slice(EXPERT_DOWN, 5, 8, SliceKind.EXPERTS, 3),)),
        Projection((Slice(HEAD, 8, 99),)),
    ),
    refused={"wpe": "positions carry no adapters"},
)
TIED = replace(LAYOUT, ties_embeddings=True)
Shapes = dict[str, tuple[int, ...]]


def make_config(rank: int = 2, **fields: Any) -> PeftConfig:
    settings: dict[str, Any] = {"alpha": 4.0, "rank_pattern": (), "alpha_pattern": (), **fields}
    return PeftConfig(rank=rank, uses_rslora=False, **settings)


def tensor_name(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def pair(
    module: str, in_features: int, out_features: int, rank: int = 2
) -> dict[str, tuple[int, ...]]:
    return {
        tensor_name(module, "A"): (rank, in_features),
        tensor_name(module, "B"): (out_features, rank),
    }


def experts_pair(in_features: int, out_features: int, *, depth: int = 0, rank: int = 2) -> Shapes:
    """A and B of a parameter of three experts, inside `depth` further wrappers."""
    return pair(EXPERTS + ".base_layer" * depth, in_features, out_features, rank=3 * rank)


def embedding_pair(vocabulary: int = 99, width: int = 8, rank: int = 2) -> Shapes:
    prefix = f"base_model.model.{EMBEDDING}.lora_embedding_"
    return {f"{prefix}A": (rank, vocabulary), f"{prefix}B": (width, rank)}


def bind_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    config: PeftConfig | None = None,
    layout: BaseLayout = LAYOUT,
) -> Binding:
    tensors = {name: TensorEntry(name, "F32", shape, 0, 0) for name, shape in shapes.items()}
    return bind(tensors, config or make_config(), layout)


def extras_of(binding: Binding) -> list[Extra]:
    return [part.extra for part in binding.auxiliary]


def test_binds_in_layout_order_whatever_the_order_of_the_file() -> None:
    bound = bind_shapes(pair(HEAD, 8, 99) | pair(DOWN, 16, 8) | pair(V, 8, 4)).slices
    assert [(part.index, part.module) for part in bound] == [(2, V), (3, DOWN), (7, HEAD)]
    assert tuple(matrix.tensor.name for matrix in bound[0].matrices) == (
        tensor_name(V, "A"),
        tensor_name(V, "B"),
    )
    assert (bound[0].rank, bound[0].scale) == (2, 2.0)


UNBOUND: dict[str, tuple[dict[str, tuple[int, ...]], str, str]] = {
    "other module": (pair("layers.9.attn.q_proj", 8, 8), "wrong_base", "layers.9.attn.q_proj"),
    "other model": (pair("h.0.c_attn", 8, 24), "wrong_base", "h.0.c_attn"),
    "in_features": (pair(Q, 9, 8), "shape_mismatch", "lora_A"),
    "out_features": (pair(Q, 8, 9), "shape_mismatch", "lora_B"),
    "swapped matrices": (
        {tensor_name(Q, "A"): (8, 2), tensor_name(Q, "B"): (2, 8)},
        "shape_mismatch",
        "lora_A",
    ),
    "inner rank differs": (
        {tensor_name(Q, "A"): (2, 8), tensor_name(Q, "B"): (8, 3)},
        "shape_mismatch",
        "lora_B",
    ),
    "flat matrix": ({**pair(Q, 8, 8), tensor_name(Q, "A"): (16,)}, "shape_mismatch", "lora_A"),
    "scalar": ({**pair(Q, 8, 8), tensor_name(Q, "A"): ()}, "shape_mismatch", "lora_A"),
    "rank differs": (pair(Q, 8, 8, rank=3), "rank_mismatch", "lora_A"),
    "only A": ({tensor_name(Q, "A"): (2, 8)}, "missing_pair", Q),
    "only B": ({tensor_name(Q, "B"): (8, 2)}, "missing_pair", Q),
    "a refused module": (pair("wpe", 8, 99), "unsupported_module", "wpe"),
    "embedding named as linear": (pair(EMBEDDING, 99, 8), "unbound_tensor", EMBEDDING),
    "linear named as embedding": (
        {f"base_model.model.{Q}.lora_embedding_A": (2, 8)},
        "unbound_tensor",
        "lora_embedding_A",
    ),
    "wrapped linear": (pair(f"{Q}.base_layer", 8, 8), "unbound_tensor", Q),
    "embedding of another vocabulary": (embedding_pair(100), "resized_vocabulary", "embedding_A"),
    "embedding without B": (
        {f"base_model.model.{EMBEDDING}.lora_embedding_A": (2, 99)},
        "missing_pair",
        EMBEDDING,
    ),
    "magnitude without DoRA": (
        {**pair(Q, 8, 8), f"base_model.model.{Q}.lora_magnitude_vector": (8,)},
        "config_contradiction",
        "lora_magnitude_vector",
    ),
    "lora bias not announced": (
        {**pair(Q, 8, 8), f"base_model.model.{Q}.lora_B.bias": (8,)},
        "config_contradiction",
        "lora_B.bias",
    ),
    "bias of lora_A": (
        {**pair(Q, 8, 8), f"base_model.model.{Q}.lora_A.bias": (2,)},
        "unsupported_feature",
        "lora_A.bias",
    ),
    "bias not announced": (
        {**pair(Q, 8, 8), f"base_model.model.{Q}.bias": (8,)},
        "config_contradiction",
        "bias",
    ),
    "whole matrix of a decoder layer": (
        {f"base_model.model.{Q}.weight": (8, 8)},
        "unsupported_module",
        Q,
    ),
    "norm": ({"base_model.model.norm.weight": (8,)}, "unsupported_module", "norm"),
    "rows not announced": (
        {f"base_model.model.{EMBEDDING}.token_adapter.trainable_tokens_delta": (2, 8)},
        "config_contradiction",
        "trainable_tokens",
    ),
    "experts not announced": (experts_pair(5, 8), "config_contradiction", EXPERTS),
    "resized head": (
        {f"base_model.model.{HEAD}.weight": (107, 8)},
        "resized_vocabulary",
        HEAD,
    ),
    "kasa": ({f"base_model.model.{Q}.lora_diag": (2,)}, "unsupported_feature", "lora_diag"),
    "without prefix": ({f"{Q}.lora_A.weight": (2, 8)}, "unbound_tensor", Q),
    "adapter name inside": (
        {f"base_model.model.{Q}.lora_A.default.weight": (2, 8)},
        "unbound_tensor",
        "default",
    ),
    "kohya": ({"lora_unet_down_blocks_0.lora_down.weight": (2, 8)}, "unbound_tensor", "lora_down"),
}


@pytest.mark.parametrize(("shapes", "reason", "named"), UNBOUND.values(), ids=UNBOUND.keys())
def test_refuses_what_does_not_bind_and_names_it(
    shapes: dict[str, tuple[int, ...]], reason: str, named: str
) -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(shapes)
    assert caught.value.reason == reason
    assert named in (caught.value.pointer or "")
    assert named in str(caught.value)


def test_one_unbound_tensor_among_bound_ones_refuses_the_adapter() -> None:
    with pytest.raises(AdapterRejected, match=r"layers\.9"):
        bind_shapes(pair(Q, 8, 8) | pair("layers.9.attn.q_proj", 8, 8))


def test_a_module_that_the_base_refuses_names_its_reason() -> None:
    with pytest.raises(AdapterRejected, match="positions carry no adapters"):
        bind_shapes(pair("wpe", 8, 99))


def test_refuses_a_rank_beyond_the_limit_even_if_the_configuration_agrees() -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(pair(Q, 8, 8, rank=MAX_RANK + 1), make_config(rank=MAX_RANK + 1))
    assert caught.value.reason == "rank_too_large"


def test_embedding_binds_by_its_own_names() -> None:
    (part,) = bind_shapes(embedding_pair()).slices
    assert (part.index, part.rank) == (0, 2)
    assert [matrix.tensor.shape for matrix in part.matrices] == [(2, 99), (8, 2)]


def test_nested_wrappers_bind_to_the_parameters_that_their_shapes_fit() -> None:
    config = make_config(target_parameters=("experts.down_proj", "experts.gate_up_proj"))
    shapes = experts_pair(8, 10, depth=1) | experts_pair(5, 8)
    down_outside = bind_shapes(shapes, config).slices
    assert [(part.module, part.a[0].tensor.name) for part in down_outside] == [
        (GATE_UP, tensor_name(f"{EXPERTS}.base_layer", "A")),
        (EXPERT_DOWN, tensor_name(EXPERTS, "A")),
    ]
    gate_up_outside = bind_shapes(experts_pair(5, 8, depth=1) | experts_pair(8, 10), config).slices
    assert [part.a[0].tensor.name for part in gate_up_outside] == [
        tensor_name(EXPERTS, "A"),
        tensor_name(f"{EXPERTS}.base_layer", "A"),
    ]
    assert all(part.rank == 2 and part.is_parameter for part in down_outside)


def test_rank_and_scale_of_experts_follow_the_pattern_that_peft_writes_for_fused_ones() -> None:
    config = make_config(
        rank_pattern=((r".*\.gate_up_proj", 4),),
        alpha_pattern=((r".*\.gate_up_proj", 16.0),),
        target_parameters=("down_proj", "gate_up_proj"),
    )
    shapes = experts_pair(8, 10, depth=1, rank=4) | experts_pair(5, 8)
    gate_up, down = bind_shapes(shapes, config).slices
    assert (gate_up.rank, gate_up.scale) == (4, 4.0)
    assert (down.rank, down.scale) == (2, 2.0)


def test_router_is_a_parameter_whose_patterns_end_in_weight() -> None:
    targeted = make_config(
        target_parameters=("gate.weight",), alpha_pattern=(("gate.weight", 10.0), ("gate", 1.0))
    )
    (part,) = bind_shapes(pair(ROUTER, 8, 3), targeted).slices
    assert (part.module, part.scale, part.is_parameter) == (ROUTER, 5.0, True)
    (part,) = bind_shapes(pair(ROUTER, 8, 3), replace(targeted, target_parameters=())).slices
    assert (part.scale, part.is_parameter) == (0.5, False)


TWINS = BaseLayout(
    "base",
    (
        Projection((Slice(f"{EXPERTS}.gate_proj", 8, 5, SliceKind.EXPERTS, 3),)),
        Projection((Slice(f"{EXPERTS}.up_proj", 8, 5, SliceKind.EXPERTS, 3),)),
    ),
)


def test_of_parameters_of_one_shape_the_first_one_is_innermost() -> None:
    gate, up = (f"{EXPERTS}.{name}" for name in ("gate_proj", "up_proj"))
    config = make_config(target_parameters=(up, gate))
    parts = bind_shapes(experts_pair(8, 5, depth=1) | experts_pair(8, 5), config, TWINS).slices
    assert [(part.module, part.a[0].tensor.name) for part in parts] == [
        (gate, tensor_name(f"{EXPERTS}.base_layer", "A")),
        (up, tensor_name(EXPERTS, "A")),
    ]


def test_one_pair_for_two_parameters_of_one_shape_is_ambiguous() -> None:
    config = make_config(target_parameters=("gate_proj", "up_proj"))
    with pytest.raises(AdapterRejected, match="Name only the trained parameters") as caught:
        bind_shapes(experts_pair(8, 5), config, TWINS)
    assert caught.value.reason == "ambiguous_experts"
    (part,) = bind_shapes(
        experts_pair(8, 5), replace(config, target_parameters=("up_proj",)), TWINS
    ).slices
    assert part.module == f"{EXPERTS}.up_proj"


def test_ranks_tell_parameters_of_one_shape_apart() -> None:
    config = make_config(target_parameters=("gate_proj", "up_proj"), rank_pattern=(("up_proj", 4),))
    gate, up = bind_shapes(
        experts_pair(8, 5, depth=1, rank=4) | experts_pair(8, 5), config, TWINS
    ).slices
    assert (gate.rank, up.rank) == (2, 4)
    assert up.a[0].tensor.name == tensor_name(f"{EXPERTS}.base_layer", "A")


EXPERTS_CONFIG = make_config(target_parameters=("gate_up_proj", "down_proj"))
WRONG_EXPERTS: dict[str, tuple[Shapes, PeftConfig, str]] = {
    "fits none": (experts_pair(6, 8), EXPERTS_CONFIG, "shape_mismatch"),
    "another order within one": (
        {**experts_pair(8, 5), tensor_name(EXPERTS, "B"): (6, 5)},
        EXPERTS_CONFIG,
        "shape_mismatch",
    ),
    "experts missing": (pair(EXPERTS, 5, 8, rank=2), EXPERTS_CONFIG, "shape_mismatch"),
    "rank not of every expert": (pair(EXPERTS, 5, 8, rank=7), EXPERTS_CONFIG, "shape_mismatch"),
    "other rank": (experts_pair(5, 8, rank=3), EXPERTS_CONFIG, "rank_mismatch"),
    "one parameter twice": (
        experts_pair(5, 8) | experts_pair(5, 8, depth=1),
        EXPERTS_CONFIG,
        "shape_mismatch",
    ),
    "hole between wrappers": (
        experts_pair(5, 8) | experts_pair(8, 10, depth=2),
        EXPERTS_CONFIG,
        "missing_pair",
    ),
    "more than targeted": (
        experts_pair(5, 8) | experts_pair(8, 10, depth=1),
        make_config(target_parameters=("down_proj",)),
        "config_contradiction",
    ),
    "inside another wrapper, alone": (
        experts_pair(5, 8, depth=1),
        EXPERTS_CONFIG,
        "missing_pair",
    ),
    "lora bias": (
        experts_pair(5, 8),
        replace(EXPERTS_CONFIG, uses_lora_bias=True),
        "config_contradiction",
    ),
    "dora": (experts_pair(5, 8), replace(EXPERTS_CONFIG, uses_dora=True), "config_contradiction"),
    "parameter of a linear layer": (
        pair(Q, 8, 8),
        make_config(target_parameters=("q_proj.weight",)),
        "unsupported_feature",
    ),
}


WRONG_PARTS: dict[str, tuple[Shapes, str, str]] = {
    "no such expert": (pair(f"{EXPERTS}.3.down_proj", 5, 8), "wrong_base", "experts.3"),
    "no such matrix": (pair(f"{EXPERTS}.0.w4", 5, 8), "wrong_base", "w4"),
    "number with zeros": (pair(f"{EXPERTS}.01.down_proj", 5, 8), "wrong_base", "experts.01"),
    "another block": (pair("layers.1.moe.experts.0.w2", 5, 8), "wrong_base", "moe"),
    "layer without experts": (pair("layers.0.mlp.experts.0.w2", 5, 8), "wrong_base", "layers.0"),
    "other inputs": (pair(f"{EXPERTS}.0.w2", 6, 8), "shape_mismatch", "lora_A"),
    "outputs of both halves": (pair(f"{EXPERTS}.0.w1", 8, 10), "shape_mismatch", "lora_B"),
    "other rank": (pair(f"{EXPERTS}.0.w2", 5, 8, rank=3), "rank_mismatch", "lora_A"),
    "other number of experts": (
        {
            tensor_name(f"{EXPERTS}.w2", "A"): (2, 2, 5),
            tensor_name(f"{EXPERTS}.w2", "B"): (2, 8, 2),
        },
        "shape_mismatch",
        "lora_A",
    ),
    "stacked with an expert's name": (
        {
            tensor_name(f"{EXPERTS}.0.w2", "A"): (1, 2, 5),
            tensor_name(f"{EXPERTS}.0.w2", "B"): (8, 2),
        },
        "shape_mismatch",
        "lora_A",
    ),
    "vector": (
        {**pair(f"{EXPERTS}.0.w2", 5, 8), tensor_name(f"{EXPERTS}.0.w2", "A"): (10,)},
        "shape_mismatch",
        "lora_A",
    ),
    "only B of an expert": (
        {tensor_name(f"{EXPERTS}.0.w2", "B"): (8, 2)},
        "missing_pair",
        "lora_B",
    ),
    "A of one, B of another": (
        {
            tensor_name(f"{EXPERTS}.0.w2", "A"): (2, 5),
            tensor_name(f"{EXPERTS}.1.w2", "B"): (8, 2),
        },
        "missing_pair",
        "experts.",
    ),
    "shared A alone": ({tensor_name(f"{EXPERTS}.w2", "A"): (1, 2, 5)}, "missing_pair", "lora_A"),
    "of one and of all": (
        pair(f"{EXPERTS}.0.w2", 5, 8) | pair(f"{EXPERTS}.w2", 5, 8),
        "config_contradiction",
        "w2",
    ),
    "two names of one matrix": (
        pair(f"{EXPERTS}.0.w2", 5, 8) | pair(f"{EXPERTS}.0.down_proj", 5, 8),
        "config_contradiction",
        "down_proj",
    ),
    "gate and all": (
        pair(f"{EXPERTS}.w1", 8, 5) | pair(f"{EXPERTS}.gate_up_proj", 8, 10),
        "config_contradiction",
        "w1",
    ),
    "wrapped and separate": (
        experts_pair(5, 8) | pair(f"{EXPERTS}.0.w2", 5, 8),
        "config_contradiction",
        "which other tensors change",
    ),
    "magnitude": (
        {
            **pair(f"{EXPERTS}.0.w2", 5, 8),
            f"base_model.model.{EXPERTS}.0.w2.lora_magnitude_vector": (8,),
        },
        "unsupported_feature",
        "Experts support A and B only",
    ),
    "bias": (
        {**pair(f"{EXPERTS}.0.w2", 5, 8), f"base_model.model.{EXPERTS}.0.w2.bias": (8,)},
        "unsupported_feature",
        "Experts support A and B only",
    ),
}


@pytest.mark.parametrize(("shapes", "reason", "named"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_refuses_parts_of_experts_that_do_not_fit(shapes: Shapes, reason: str, named: str) -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(shapes, make_config(target_parameters=("experts.down_proj",)))
    assert caught.value.reason == reason
    assert named in str(caught.value)


def test_a_router_may_have_its_blocks_older_name() -> None:
    (part,) = bind_shapes(pair("layers.1.block_sparse_moe.gate", 8, 3)).slices
    assert part.module == ROUTER


@pytest.mark.parametrize(
    ("shapes", "config", "reason"), WRONG_EXPERTS.values(), ids=WRONG_EXPERTS.keys()
)
def test_refuses_experts_that_do_not_fit(shapes: Shapes, config: PeftConfig, reason: str) -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(shapes, config)
    assert caught.value.reason == reason


def test_magnitudes_and_biases_bind_beside_their_matrices() -> None:
    dora = pair(Q, 8, 8) | {f"base_model.model.{Q}.lora_magnitude_vector": (8,)}
    dora |= embedding_pair() | {f"base_model.model.{EMBEDDING}.lora_magnitude_vector": (8,)}
    assert extras_of(bind_shapes(dora, make_config(uses_dora=True))) == [
        Extra(0, ExtraKind.MAGNITUDE, (8,)),
        Extra(1, ExtraKind.MAGNITUDE, (8,)),
    ]
    biased = pair(V, 8, 4) | {f"base_model.model.{V}.lora_B.bias": (4,)}
    (lora_bias,) = bind_shapes(biased, make_config(uses_lora_bias=True)).auxiliary
    assert (lora_bias.extra, lora_bias.scale) == (Extra(2, ExtraKind.LORA_BIAS, (4,)), 2.0)


def test_biases_bind_whether_their_layer_has_lora_or_not() -> None:
    shapes = pair(Q, 8, 8) | {
        f"base_model.model.{DOWN}.bias": (8,),
        f"base_model.model.{Q}.base_layer.bias": (8,),
    }
    assert extras_of(bind_shapes(shapes, make_config(bias="all"))) == [
        Extra(1, ExtraKind.BIAS, (8,)),
        Extra(3, ExtraKind.BIAS, (8,)),
    ]


def test_whole_matrices_bind_to_embedding_and_head() -> None:
    shapes: Shapes = {
        f"base_model.model.{HEAD}.weight": (99, 8),
        f"base_model.model.{HEAD}.bias": (99,),
        f"base_model.model.{EMBEDDING}.weight": (99, 8),
    }
    config = make_config(modules_to_save=("embed_tokens", "lm_head"))
    assert extras_of(bind_shapes(shapes, config)) == [
        Extra(0, ExtraKind.MATRIX, (99, 8)),
        Extra(7, ExtraKind.BIAS, (99,)),
        Extra(7, ExtraKind.MATRIX, (99, 8)),
    ]


def test_a_matrix_that_was_not_announced_is_held_for_a_copy_of_the_base() -> None:
    shapes = pair(Q, 8, 8) | {
        f"base_model.model.{EMBEDDING}.base_layer.weight": (99, 8),
        f"base_model.model.{HEAD}.weight": (99, 8),
    }
    binding = bind_shapes(shapes)
    assert [copy.module for copy in binding.copies] == [EMBEDDING, HEAD]
    assert binding.auxiliary == ()


def test_a_head_that_peft_tied_to_a_saved_embedding_is_announced_with_it() -> None:
    shapes: Shapes = {
        f"base_model.model.{EMBEDDING}.weight": (99, 8),
        f"base_model.model.{HEAD}.weight": (99, 8),
    }
    config = make_config(modules_to_save=("embed_tokens",))
    assert len(bind_shapes(shapes, config, TIED).copies) == 1
    tying = replace(config, ensures_weight_tying=True)
    assert len(bind_shapes(shapes, tying, TIED).auxiliary) == 2
    assert len(bind_shapes(shapes, tying, LAYOUT).copies) == 1


def rows_of(module: str, num_tokens: int) -> Shapes:
    name = f"base_model.model.{module}.token_adapter.trainable_tokens_delta"
    return {name: (num_tokens, 8)}


def test_rows_of_tokens_are_sorted_and_remember_where_they_stood() -> None:
    config = make_config(trained_tokens=(("", (7, 3, 98)),))
    (part,) = bind_shapes(rows_of(EMBEDDING, 3), config).auxiliary
    assert part.extra == Extra(0, ExtraKind.TOKEN_ROWS, (3, 8), (3, 7, 98))
    assert part.rows == (1, 0, 2)


def test_rows_of_a_tied_embedding_are_the_heads_too() -> None:
    config = make_config(trained_tokens=(("", (7, 3)),))
    embedding, head = bind_shapes(rows_of(EMBEDDING, 2), config, TIED).auxiliary
    assert (embedding.is_derived, head.is_derived) == (False, True)
    assert head.extra == Extra(7, ExtraKind.TOKEN_ROWS, (2, 8), (3, 7))
    assert head.tensor is embedding.tensor


def test_a_tied_head_with_the_embeddings_tokens_needs_no_rows_of_its_own() -> None:
    config = make_config(trained_tokens=(("embed_tokens", (7, 3)), ("lm_head", (7, 3))))
    _, head = bind_shapes(rows_of(EMBEDDING, 2), config, TIED).auxiliary
    assert head.is_derived


def test_a_tied_head_with_rows_of_its_own_keeps_them() -> None:
    config = make_config(trained_tokens=(("embed_tokens", (7, 3)), ("lm_head", (5,))))
    shapes = rows_of(EMBEDDING, 2) | rows_of(HEAD, 1)
    for layout in (TIED, LAYOUT):
        embedding, head = bind_shapes(shapes, config, layout).auxiliary
        assert (embedding.extra.token_ids, head.extra.token_ids) == ((3, 7), (5,))
        assert not head.is_derived


WRONG_EXTRAS: dict[str, tuple[Shapes, PeftConfig, str]] = {
    "magnitude missing": (pair(Q, 8, 8), make_config(uses_dora=True), "config_contradiction"),
    "magnitude alone": (
        {f"base_model.model.{Q}.lora_magnitude_vector": (8,)},
        make_config(uses_dora=True),
        "missing_pair",
    ),
    "magnitude of inputs": (
        {**pair(V, 8, 4), f"base_model.model.{V}.lora_magnitude_vector": (8,)},
        make_config(uses_dora=True),
        "shape_mismatch",
    ),
    "magnitude of an unknown layer": (
        {**pair(Q, 8, 8), "base_model.model.other.lora_magnitude_vector": (8,)},
        make_config(uses_dora=True),
        "wrong_base",
    ),
    "embedding's magnitude, by token": (
        {**embedding_pair(), f"base_model.model.{EMBEDDING}.lora_magnitude_vector": (99,)},
        make_config(uses_dora=True),
        "shape_mismatch",
    ),
    "embedding without magnitude": (
        embedding_pair(),
        make_config(uses_dora=True),
        "config_contradiction",
    ),
    "embedding's bias": (
        {**embedding_pair(), f"base_model.model.{EMBEDDING}.bias": (8,)},
        make_config(bias="all"),
        "unbound_tensor",
    ),
    "lora bias missing": (pair(Q, 8, 8), make_config(uses_lora_bias=True), "config_contradiction"),
    "norm's bias": (
        {**pair(Q, 8, 8), "base_model.model.layers.0.norm.bias": (8,)},
        make_config(bias="all"),
        "unsupported_module",
    ),
    "router's bias": (
        {**pair(Q, 8, 8), f"base_model.model.{ROUTER}.bias": (3,)},
        make_config(bias="all"),
        "unsupported_feature",
    ),
    "bias twice": (
        {
            **pair(Q, 8, 8),
            f"base_model.model.{Q}.bias": (8,),
            f"base_model.model.{Q}.base_layer.bias": (8,),
        },
        make_config(bias="all"),
        "config_contradiction",
    ),
    "matrix and LoRA": (
        {**pair(HEAD, 8, 99), f"base_model.model.{HEAD}.weight": (99, 8)},
        make_config(modules_to_save=("lm_head",)),
        "config_contradiction",
    ),
    "matrix and rows": (
        {**rows_of(HEAD, 1), f"base_model.model.{HEAD}.weight": (99, 8)},
        make_config(modules_to_save=("lm_head",), trained_tokens=(("lm_head", (5,)),)),
        "config_contradiction",
    ),
    "matrix of another width": (
        {f"base_model.model.{HEAD}.weight": (99, 9)},
        make_config(modules_to_save=("lm_head",)),
        "shape_mismatch",
    ),
    "rows missing": (
        pair(Q, 8, 8),
        make_config(trained_tokens=(("", (5,)),)),
        "config_contradiction",
    ),
    "rows of one of two modules missing": (
        rows_of(EMBEDDING, 2),
        make_config(trained_tokens=(("embed_tokens", (7, 3)), ("lm_head", (7, 3)))),
        "config_contradiction",
    ),
    "too few rows": (
        rows_of(EMBEDDING, 1),
        make_config(trained_tokens=(("", (5, 6)),)),
        "shape_mismatch",
    ),
    "unknown token": (
        rows_of(EMBEDDING, 1),
        make_config(trained_tokens=(("", (99 + MAX_ADDED_TOKENS,)),)),
        "wrong_base",
    ),
    "added token of the embedding alone": (
        rows_of(EMBEDDING, 1),
        make_config(trained_tokens=(("", (99,)),)),
        "resized_vocabulary",
    ),
    "added tokens with a gap": (
        {**rows_of(EMBEDDING, 1), **rows_of(HEAD, 1)},
        make_config(trained_tokens=((EMBEDDING, (100,)), (HEAD, (100,)))),
        "resized_vocabulary",
    ),
    "more rows than may be added": (
        {f"base_model.model.{HEAD}.weight": (99 + MAX_ADDED_TOKENS + 1, 8)},
        make_config(modules_to_save=(HEAD,)),
        "resized_vocabulary",
    ),
    "some of the added rows trained": (
        {
            **rows_of(EMBEDDING, 1),
            f"base_model.model.{EMBEDDING}.token_adapter.base_layer.weight": (101, 8),
        },
        make_config(trained_tokens=(("", (99,)),)),
        "resized_vocabulary",
    ),
    "rows of a linear layer": (
        rows_of(Q, 1),
        make_config(trained_tokens=(("q_proj", (5,)),)),
        "unsupported_module",
    ),
}


@pytest.mark.parametrize(
    ("shapes", "config", "reason"), WRONG_EXTRAS.values(), ids=WRONG_EXTRAS.keys()
)
def test_refuses_what_contradicts_the_configuration_or_the_base(
    shapes: Shapes, config: PeftConfig, reason: str
) -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(shapes, config)
    assert caught.value.reason == reason


def test_rows_of_a_tied_embedding_need_a_head_that_carries_adapters() -> None:
    headless = BaseLayout("base", LAYOUT.projections[:-1], ties_embeddings=True)
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(rows_of(EMBEDDING, 1), make_config(trained_tokens=(("", (5,)),)), headless)
    assert caught.value.reason == "unsupported_module"


MODULES = st.sampled_from([EMBEDDING, HEAD, Q, V, ROUTER, EXPERTS, "wpe", "layers.9.norm", ""])
ENDS = st.sampled_from([*TensorRole, "lora_A.default.weight", "original_module.weight", ""])
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 10, 24, 30, 99])
CONFIGS = st.builds(
    make_config,
    uses_dora=st.booleans(),
    uses_lora_bias=st.booleans(),
    bias=st.sampled_from(["none", "all"]),
    modules_to_save=st.sampled_from([(), ("lm_head",), ("embed_tokens", "lm_head")]),
    target_parameters=st.sampled_from(
        [(), ("down_proj",), ("down_proj", "gate_up_proj", "weight")]
    ),
    trained_tokens=st.sampled_from([(), (("", (3, 1)),), (("lm_head", (98, 0, 5)),)]),
    ensures_weight_tying=st.booleans(),
)


GOOD: list[Shapes] = [
    pair(Q, 8, 8) | pair(HEAD, 8, 99),
    pair(V, 8, 4) | {f"base_model.model.{V}.lora_B.bias": (4,)},
    pair(Q, 8, 8) | embedding_pair(),
    pair(ROUTER, 8, 3) | experts_pair(8, 10, depth=1) | experts_pair(5, 8),
    {f"base_model.model.{HEAD}.weight": (99, 8), f"base_model.model.{EMBEDDING}.weight": (99, 8)},
    pair(Q, 8, 8) | rows_of(EMBEDDING, 2),
]
STRANGE = st.dictionaries(
    st.builds(
        lambda module, depth, end: f"base_model.model.{module}{'.base_layer' * depth}.{end}",
        MODULES,
        st.integers(0, 2),
        ENDS,
    ),
    st.lists(SIZES, max_size=2).map(tuple),
    max_size=3,
)


def outcome_of(
    tensors: Shapes, config: PeftConfig, layout: BaseLayout
) -> Binding | AdapterRejected:
    try:
        return bind_shapes(tensors, config, layout)
    except AdapterRejected as error:
        return error


@given(
    tensors=st.builds(lambda good, strange: good | strange, st.sampled_from(GOOD), STRANGE),
    config=CONFIGS,
    layout=st.sampled_from([LAYOUT, TIED, TWINS]),
)
def test_every_tensor_has_one_place_or_is_refused_with_a_published_reason(
    tensors: Shapes, config: PeftConfig, layout: BaseLayout
) -> None:
    outcome = outcome_of(tensors, config, layout)
    if isinstance(outcome, AdapterRejected):
        assert outcome.reason in REJECTIONS
        assert outcome.pointer
        return
    bound = [tensor.name for tensor in outcome.tensors]
    copies = [copy.tensor.name for copy in outcome.copies]
    assert sorted(bound + copies) == sorted(tensors)


SCORE = "base_model.model.score.weight"
CLASSIFIER: dict[str, Any] = {
    "is_classifier": True,
    "modules_to_save": ("classifier", "score"),
}


def test_a_classification_head_is_bound_beside_the_output_head() -> None:
    shapes = {**pair(Q, 8, 8), SCORE: (5, 8)}
    (head,) = bind_shapes(shapes, make_config(**CLASSIFIER)).auxiliary
    assert head.extra == Extra(len(LAYOUT.slices) - 1, ExtraKind.CLASSIFICATION_HEAD, (5, 8))
    assert (head.layer.name, head.layer.out_features) == ("score", 5)


@pytest.mark.parametrize(
    ("shapes", "config", "layout", "reason"),
    [
        ({}, CLASSIFIER, LAYOUT, "config_contradiction"),
        ({SCORE: (5, 7)}, CLASSIFIER, LAYOUT, "shape_mismatch"),
        ({SCORE: (8,)}, CLASSIFIER, LAYOUT, "shape_mismatch"),
        ({SCORE: (MAX_LABELS + 1, 8)}, CLASSIFIER, LAYOUT, "unsupported_feature"),
        (
            {"base_model.model.classifier.weight": (5, 8)},
            CLASSIFIER,
            LAYOUT,
            "unsupported_module",
        ),
        ({SCORE: (5, 8)}, {"modules_to_save": ("score",)}, LAYOUT, "unsupported_module"),
        (
            {SCORE: (5, 8)},
            CLASSIFIER,
            replace(LAYOUT, projections=LAYOUT.projections[1:-1]),
            "unsupported_module",
        ),
    ],
    ids=[
        "no head",
        "another width",
        "a vector",
        "too many labels",
        "a head of another name",
        "another task",
        "a base whose output head takes no adapters",
    ],
)
def test_a_classification_head_that_cannot_be_served_is_refused(
    shapes: Shapes, config: dict[str, Any], layout: BaseLayout, reason: str
) -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes({**pair(Q, 8, 8), **shapes}, make_config(**config), layout)
    assert caught.value.reason == reason
    assert caught.value.pointer


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("score", CLASSIFIER, "A classification head has a matrix only."),
        ("classifier", CLASSIFIER, "as transformers' `score` is"),
        ("layers.0.norm", {**CLASSIFIER, "bias": "all"}, "Train with `bias='lora_only'`."),
    ],
    ids=["head", "head of another name", "norm"],
)
def test_a_bias_beside_the_linear_layers_is_refused_in_the_words_of_its_module(
    name: str, config: dict[str, Any], words: str
) -> None:
    bias = f"base_model.model.{name}.bias"
    shapes = {**pair(Q, 8, 8), SCORE: (5, 8), bias: (5,)}
    with pytest.raises(AdapterRejected, match=re.escape(words)) as caught:
        bind_shapes(shapes, make_config(**config))
    assert (caught.value.reason, caught.value.pointer) == ("unsupported_module", bias)


def draft_head(head_id: str = "0a" * 32, shape: tuple[int, ...] = (40,)) -> Shapes:
    return {f"base_model.model.draft_head.{head_id}": shape}


@pytest.mark.parametrize("layout", [LAYOUT, TIED])
def test_a_draft_head_is_bound_beside_the_output_head(layout: BaseLayout) -> None:
    (part,) = bind_shapes(pair(Q, 8, 8) | draft_head(), layout=layout).auxiliary
    index = layout.slice_index[HEAD]
    assert part.extra == Extra(index, ExtraKind.DRAFT_HEAD, (40,), head_id="0a" * 32)


@pytest.mark.parametrize(
    ("shapes", "layout", "reason"),
    [
        (draft_head("0A" * 32), LAYOUT, "unbound_tensor"),
        (draft_head("0a" * 31), LAYOUT, "unbound_tensor"),
        (draft_head(""), LAYOUT, "unbound_tensor"),
        (draft_head(shape=(5, 8)), LAYOUT, "shape_mismatch"),
        (draft_head(shape=()), LAYOUT, "shape_mismatch"),
        (draft_head(shape=(0,)), LAYOUT, "shape_mismatch"),
        (draft_head() | draft_head("0b" * 32), LAYOUT, "config_contradiction"),
        (
            draft_head(),
            BaseLayout("base", (Projection((Slice(Q, 8, 8),)),)),
            "unsupported_module",
        ),
        ({f"base_model.model.{Q}.draft_head": (8,)}, LAYOUT, "unbound_tensor"),
    ],
)
def test_a_draft_head_that_cannot_be_kept_is_refused(
    shapes: Shapes, layout: BaseLayout, reason: str
) -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(pair(Q, 8, 8) | shapes, layout=layout)
    assert caught.value.reason == reason
    assert "draft_head" in str(caught.value.pointer)
