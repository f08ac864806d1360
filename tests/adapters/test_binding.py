from __future__ import annotations

from collections.abc import Mapping

import pytest

from loraplex.adapters.binding import BoundSlice, bind
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.layout import BaseLayout, Projection, Slice
from loraplex.adapters.peft_config import MAX_RANK, PeftConfig
from loraplex.adapters.safetensors_header import TensorEntry

Q, V, DOWN = "layers.0.attn.q_proj", "layers.0.attn.v_proj", "layers.0.mlp.down_proj"
LAYOUT = BaseLayout(
    "base",
    (
        Projection((Slice(Q, 8, 8), Slice(V, 8, 4))),
        Projection((Slice(DOWN, 16, 8),)),
    ),
    refused={"lm_head": "the head carries no adapters"},
)


def make_config(rank: int = 2) -> PeftConfig:
    return PeftConfig(rank=rank, alpha=4.0, uses_rslora=False, rank_pattern=(), alpha_pattern=())


def tensor_name(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def pair(
    module: str, in_features: int, out_features: int, rank: int = 2
) -> dict[str, tuple[int, ...]]:
    return {
        tensor_name(module, "A"): (rank, in_features),
        tensor_name(module, "B"): (out_features, rank),
    }


def bind_shapes(
    shapes: Mapping[str, tuple[int, ...]], config: PeftConfig | None = None
) -> list[BoundSlice]:
    tensors = {name: TensorEntry(name, "F32", shape, 0, 0) for name, shape in shapes.items()}
    return bind(tensors, config or make_config(), LAYOUT)


def test_binds_in_layout_order_whatever_the_order_of_the_file() -> None:
    bound = bind_shapes(pair(DOWN, 16, 8) | pair(V, 8, 4))
    assert [(part.index, part.module) for part in bound] == [(1, V), (2, DOWN)]
    assert (bound[0].a.name, bound[0].b.name) == (tensor_name(V, "A"), tensor_name(V, "B"))
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
    "the head": (pair("lm_head", 8, 99), "unsupported_module", "lm_head"),
    "dora": (
        {**pair(Q, 8, 8), f"base_model.model.{Q}.lora_magnitude_vector": (8,)},
        "unsupported_feature",
        "lora_magnitude_vector",
    ),
    "embedding": (
        {"base_model.model.embed_tokens.lora_embedding_A": (2, 99)},
        "unsupported_feature",
        "lora_embedding_A",
    ),
    "lora bias": (
        {**pair(Q, 8, 8), f"base_model.model.{Q}.lora_B.bias": (8,)},
        "unsupported_feature",
        "lora_B.bias",
    ),
    "base leftover": (
        {"base_model.model.embed_tokens.base_layer.weight": (99, 8)},
        "unsupported_feature",
        "base_layer",
    ),
    "trained tokens": (
        {"base_model.model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 8)},
        "unsupported_feature",
        "trainable_tokens",
    ),
    "experts": (
        {"base_model.model.layers.0.mlp.experts.lora_A.weight": (4, 8)},
        "unsupported_feature",
        "experts",
    ),
    "whole matrix": ({"base_model.model.lm_head.weight": (99, 8)}, "unbound_tensor", "lm_head"),
    "bias": ({f"base_model.model.{Q}.bias": (8,)}, "unbound_tensor", "bias"),
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


def test_a_tensor_that_is_both_named_and_shaped_for_the_refused_head_names_its_reason() -> None:
    with pytest.raises(AdapterRejected, match="the head carries no adapters"):
        bind_shapes(pair("lm_head", 8, 99))


def test_refuses_a_rank_beyond_the_limit_even_if_the_configuration_agrees() -> None:
    with pytest.raises(AdapterRejected) as caught:
        bind_shapes(pair(Q, 8, 8, rank=MAX_RANK + 1), make_config(rank=MAX_RANK + 1))
    assert caught.value.reason == "rank_too_large"
