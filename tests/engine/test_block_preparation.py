"""From stored to served values, compared with the formulas on whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from loraplex.adapters.added_tokens import MAX_ADDED_TOKENS
from loraplex.adapters.arena import Arena
from loraplex.adapters.block import BlockHeader, BlockPlan, Extra, ExtraKind
from loraplex.adapters.classification import MAX_LABELS
from loraplex.adapters.errors import AdapterUnavailable, ObjectCorrupt
from loraplex.adapters.layout import BaseLayout, Projection, Slice, SliceKind
from loraplex.engine.model.adapted_module import BaseWeights
from loraplex.engine.model.block_preparation import BlockPreparation
from loraplex.engine.model.input_embedding import InputEmbedding
from loraplex.engine.model.output_head import OutputHead
from loraplex.kernels.linear import DenseLinear
from loraplex.kernels.linear_packing import pack_linear
from loraplex.kernels.quantize import WeightFormat, quantize
from support.quantized import rounded_weight

VOCAB, HIDDEN, WIDE = 60, 24, 40
EMBEDDING, Q, K, EXPERTS, HEAD = range(5)
SCALE = 1.5


@dataclass
class Fused:
    """A projection of the decoder."""

    projection: Projection
    base_weights: BaseWeights
    is_partial: bool = False

    def attach(self, arena: Arena, slice_range: range) -> None: ...

    def forget_adapter(self, row: int) -> None: ...

    def forget_step(self) -> None: ...


@dataclass
class Base:
    """A layout of each kind of slice, and the base's matrices `[out, in]` as they are served."""

    layout: BaseLayout
    prepare: BlockPreparation
    weights: dict[int, Tensor]
    biases: dict[int, Tensor]


def make_base(
    *,
    weight_format: WeightFormat | None = None,
    rest: Callable[[float], None] = lambda _seconds: None,
) -> Base:
    torch.manual_seed(0)
    weight, bias = torch.randn(2 * WIDE, HIDDEN), torch.randn(2 * WIDE)
    linear = pack_linear(quantize(weight, weight_format) if weight_format else weight, bias)
    if weight_format:
        weight = rounded_weight(weight, weight_format)
    qk = Fused(Projection((Slice("q", HIDDEN, WIDE), Slice("k", HIDDEN, WIDE))), linear)
    experts = Projection((Slice("experts", HIDDEN, WIDE, SliceKind.EXPERTS, 3),))
    table, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    ends = InputEmbedding("wte", table, scale=2.0), OutputHead("head", head)
    layout = BaseLayout("base", (ends[0].projection, qk.projection, experts, ends[1].projection))
    return Base(
        layout,
        BlockPreparation(layout, [ends[0], qk, ends[1]], rest=rest),
        {
            EMBEDDING: table.weight.detach().T,
            Q: weight[:WIDE],
            K: weight[WIDE:],
            HEAD: head.weight.detach(),
        },
        {Q: bias[:WIDE], K: bias[WIDE:]},
    )


@dataclass
class Block:
    """One adapter's block with random values, its scales folded into B."""

    plan: BlockPlan
    values: Tensor
    header: BlockHeader

    def extra(self, position: int) -> Tensor:
        """The values of one extra, flat."""
        placed = self.plan.placed_auxiliary[position]
        return self.values[placed.offset : placed.offset + placed.extra.num_elements]

    def a(self, index: int) -> Tensor:
        """`[rank, in]`."""
        part, (start, _, rank) = self.plan.layout.slices[index], self.plan.table[index].tolist()
        a = self.values[start : start + rank * part.in_features]
        return a.view(-1, rank).T if part.kind is SliceKind.EMBEDDING else a.view(rank, -1)

    def b(self, index: int) -> Tensor:
        """`[rank, out]`."""
        part, (_, start, rank) = self.plan.layout.slices[index], self.plan.table[index].tolist()
        return self.values[start : start + rank * part.out_features].view(rank, -1)


def make_block(
    base: Base, ranks: dict[int, int], *auxiliary: Extra, dtype: torch.dtype = torch.float32
) -> Block:
    plan = BlockPlan(base.layout, ranks, auxiliary)
    values = torch.randn(plan.num_elements, generator=torch.Generator().manual_seed(1))
    header = BlockHeader(
        "base",
        "sha256:0",
        "F32",
        ranks,
        dict.fromkeys(ranks, SCALE),
        {},
        auxiliary,
        {},
        len(values),
        0,
    )
    return Block(plan, values.to(dtype), header)


def magnitude(index: int) -> Extra:
    out_features = HIDDEN if index == EMBEDDING else VOCAB if index == HEAD else WIDE
    return Extra(index, ExtraKind.MAGNITUDE, (out_features,))


@pytest.mark.parametrize("weight_format", [None, *WeightFormat])
@pytest.mark.parametrize("rank", [1, 16, 17, 33])
def test_dora_serves_the_factor_of_each_row(rank: int, weight_format: WeightFormat | None) -> None:
    bound = 1e-5
    base = make_base(weight_format=weight_format)
    touched = (EMBEDDING, Q, K, HEAD)
    ranks = {index: rank + index for index in touched}
    block = make_block(base, ranks, *map(magnitude, touched))
    before = Block(block.plan, block.values.clone(), block.header)

    base.prepare(block.values, block.header, block.plan)

    for position, index in enumerate(touched):
        a, b = before.a(index).double(), before.b(index).double()
        adapted = base.weights[index].double() + b.T @ a
        factor = before.extra(position).double() / adapted.norm(dim=1)
        served = block.extra(position).double()
        assert (served - (factor - 1)).abs().max() < bound * (1 + factor.abs().max())
        torch.testing.assert_close(block.b(index).double(), b * factor, rtol=bound, atol=bound / 10)
        assert torch.equal(block.a(index), before.a(index))


def test_dora_leaves_the_other_slices_of_its_projection_alone() -> None:
    base = make_base()
    block = make_block(base, {Q: 3, K: 5}, magnitude(K))
    before = Block(block.plan, block.values.clone(), block.header)
    base.prepare(block.values, block.header, block.plan)
    assert torch.equal(block.b(Q), before.b(Q))
    assert not torch.equal(block.b(K), before.b(K))


def test_biases_are_served_scaled_and_as_differences() -> None:
    base = make_base()
    auxiliary = (
        Extra(K, ExtraKind.LORA_BIAS, (WIDE,)),
        Extra(K, ExtraKind.BIAS, (WIDE,)),
        Extra(HEAD, ExtraKind.BIAS, (VOCAB,)),
    )
    block = make_block(base, {K: 2}, *auxiliary)
    before = Block(block.plan, block.values.clone(), block.header)
    base.prepare(block.values, block.header, block.plan)
    assert torch.equal(block.extra(0), before.extra(0) * SCALE)
    assert torch.equal(block.extra(1), before.extra(1) - base.biases[K])
    assert torch.equal(block.extra(2), before.extra(2)), "the head of this base has no bias"


def test_matrices_and_rows_are_served_as_they_are() -> None:
    base = make_base()
    auxiliary = (
        Extra(EMBEDDING, ExtraKind.MATRIX, (VOCAB, HIDDEN)),
        Extra(HEAD, ExtraKind.TOKEN_ROWS, (2, HIDDEN), (0, VOCAB - 1)),
    )
    block = make_block(base, {}, *auxiliary)
    before = block.values.clone()
    base.prepare(block.values, block.header, block.plan)
    assert torch.equal(block.values, before)


def test_the_thread_rests_as_long_as_it_worked() -> None:
    rests: list[float] = []
    base = make_base(rest=rests.append)
    block = make_block(base, {Q: 2, K: 2}, magnitude(Q), magnitude(K))
    base.prepare(block.values, block.header, block.plan)
    assert len(rests) == 2
    assert min(rests) > 0


def test_a_row_without_length_is_not_served() -> None:
    base = make_base()
    base.weights[Q][7] = 0
    # The base's lengths are taken when it is loaded.
    base = Base(base.layout, _prepared(base), base.weights, base.biases)
    block = make_block(base, {Q: 2}, magnitude(Q))
    block.b(Q)[:, 7] = 0
    with pytest.raises(AdapterUnavailable, match="magnitude is not finite in"):
        base.prepare(block.values, block.header, block.plan)


def _prepared(base: Base) -> BlockPreparation:
    linear = DenseLinear(torch.cat([base.weights[Q], base.weights[K]]))
    fused = Fused(base.layout.projections[1], linear)
    return BlockPreparation(base.layout, [fused], rest=lambda _seconds: None)


def test_what_overflows_the_serving_type_is_not_served() -> None:
    base = make_base()
    block = make_block(base, {K: 2}, Extra(K, ExtraKind.LORA_BIAS, (WIDE,)), dtype=torch.float16)
    block.extra(0)[5] = 60000.0
    with pytest.raises(AdapterUnavailable, match="lora_bias is not finite in"):
        base.prepare(block.values, block.header, block.plan)


MISFITS = {
    "too short": Extra(Q, ExtraKind.BIAS, (WIDE - 1,)),
    "a matrix of other width": Extra(HEAD, ExtraKind.MATRIX, (VOCAB, WIDE)),
    "a transposed table": Extra(EMBEDDING, ExtraKind.MATRIX, (HIDDEN, VOCAB)),
    "a bias for a table": Extra(EMBEDDING, ExtraKind.BIAS, (HIDDEN,)),
    "a magnitude without A and B": magnitude(Q),
    "tokens beyond those that may be added": Extra(
        HEAD, ExtraKind.TOKEN_ROWS, (2, HIDDEN), (0, VOCAB + MAX_ADDED_TOKENS)
    ),
    "a table of too many tokens": Extra(
        EMBEDDING, ExtraKind.MATRIX, (VOCAB + MAX_ADDED_TOKENS + 1, HIDDEN)
    ),
    "negative tokens": Extra(EMBEDDING, ExtraKind.TOKEN_ROWS, (2, HIDDEN), (-1, 3)),
    "tokens in disorder": Extra(EMBEDDING, ExtraKind.TOKEN_ROWS, (2, HIDDEN), (4, 3)),
    "a token twice": Extra(EMBEDDING, ExtraKind.TOKEN_ROWS, (2, HIDDEN), (3, 3)),
    "fewer tokens than rows": Extra(EMBEDDING, ExtraKind.TOKEN_ROWS, (2, HIDDEN), (3,)),
    "no tokens": Extra(EMBEDDING, ExtraKind.TOKEN_ROWS, (0, HIDDEN)),
    "a classification head of other width": Extra(
        HEAD, ExtraKind.CLASSIFICATION_HEAD, (3, HIDDEN + 1)
    ),
    "too many labels": Extra(HEAD, ExtraKind.CLASSIFICATION_HEAD, (MAX_LABELS + 1, HIDDEN)),
    "a classification head for a table": Extra(
        EMBEDDING, ExtraKind.CLASSIFICATION_HEAD, (3, HIDDEN)
    ),
    "anything for experts": Extra(EXPERTS, ExtraKind.BIAS, (WIDE,)),
}


@pytest.mark.parametrize("extra", MISFITS.values(), ids=MISFITS)
def test_an_extra_that_does_not_fit_its_slice_is_corruption(extra: Extra) -> None:
    base = make_base()
    block = make_block(base, {K: 2}, extra)
    with pytest.raises(ObjectCorrupt):
        base.prepare(block.values, block.header, block.plan)


def test_what_the_base_does_not_tell_about_serves_a_and_b_only() -> None:
    base = make_base()
    prepare = BlockPreparation(base.layout, [])
    block = make_block(base, {Q: 2}, magnitude(Q))
    with pytest.raises(AdapterUnavailable, match="q serves A and B only, no magnitude"):
        prepare(block.values, block.header, block.plan)
