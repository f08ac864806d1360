from __future__ import annotations

from loraplex.adapters.layout import (
    BaseLayout,
    Projection,
    Slice,
    SliceKind,
    layout_from_json,
    layout_to_json,
)

MLP = "model.layers.0.mlp"


def make_layout(*slices: Slice, ties_embeddings: bool = False) -> BaseLayout:
    return BaseLayout(
        "base",
        tuple(Projection((part,)) for part in slices),
        {"wpe": "not served"},
        ties_embeddings=ties_embeddings,
        digests={"embed_tokens": ["0" * 64]},
    )


EMBEDDING = Slice("embed_tokens", 99, 8, SliceKind.EMBEDDING)
ROUTER = Slice(f"{MLP}.gate", 8, 4)
EXPERTS = Slice(f"{MLP}.experts.down_proj", 5, 8, SliceKind.EXPERTS, 4, is_turned=True)
HEAD = Slice("lm_head", 8, 99)


def test_a_layout_survives_the_way_to_another_process() -> None:
    layout = make_layout(EMBEDDING, ROUTER, EXPERTS, HEAD, ties_embeddings=True)
    assert layout_from_json(layout_to_json(layout)) == layout


def test_embedding_and_head_are_found_at_the_ends() -> None:
    layout = make_layout(EMBEDDING, ROUTER, HEAD)
    assert (layout.embedding, layout.output_head) == (0, 2)


def test_a_last_layer_of_another_width_is_no_head() -> None:
    assert make_layout(EMBEDDING, ROUTER).output_head is None
    assert make_layout(EMBEDDING).output_head is None
    without_embedding = make_layout(ROUTER, HEAD)
    assert (without_embedding.embedding, without_embedding.output_head) == (None, None)
    empty = make_layout()
    assert (empty.embedding, empty.output_head) == (None, None)


def test_routers_stand_beside_experts_and_score_each_of_them() -> None:
    nested = Slice(f"{MLP}.router.layer", 8, 4)
    elsewhere = Slice("model.layers.1.mlp.gate", 8, 4)
    shared = Slice(f"{MLP}.shared_expert_gate", 8, 1)
    attention = Slice("model.layers.0.self_attn.k_proj", 8, 4)
    layout = make_layout(EMBEDDING, ROUTER, nested, elsewhere, shared, attention, EXPERTS, HEAD)
    assert layout.routers == {1, 2}
    assert layout.expert_modules == {f"{MLP}.experts": (6,)}
