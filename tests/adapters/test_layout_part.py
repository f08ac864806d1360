"""A rank's part of a block equals the slices that torch cuts from the whole block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraplex.adapters.block import BlockPlan, Extra, ExtraKind, write_block_header
from loraplex.adapters.block_reader import PIECE_ELEMENTS
from loraplex.adapters.errors import NotComposable, ObjectCorrupt
from loraplex.adapters.host_cache import HostBlock, HostCache
from loraplex.adapters.identity import AdapterKey, composed_key
from loraplex.adapters.layout import BaseLayout, Projection, Slice, SliceKind
from loraplex.adapters.layout_part import LayoutPart, SliceRange
from support.blocks import make_key

EMBEDDING = Slice("embed", 11, 8, SliceKind.EMBEDDING)
WIDE = PIECE_ELEMENTS + 6
"""One row of it takes two pieces."""
LAYOUT = BaseLayout(
    "base",
    (
        Projection((EMBEDDING,)),
        Projection((Slice("q", 8, 12), Slice("k", 8, 4))),
        Projection((Slice("o", 12, 8),)),
        Projection((Slice("down", WIDE, 3),)),
        Projection((Slice("router", 8, 5),)),
        Projection((Slice("experts", 8, 6, SliceKind.EXPERTS, 4),)),
    ),
)
PART = LayoutPart(
    LAYOUT,
    {
        "q": SliceRange(range(8), range(6, 12)),
        "k": SliceRange(range(8), range(2, 4)),
        "o": SliceRange(range(6, 12), range(8)),
        "down": SliceRange(range(3, WIDE), range(3)),
    },
    {"experts": range(1, 3)},
)
RANKS = {0: 2, 1: 3, 2: 1, 3: 4, 4: 2, 5: 3, 6: 2}
EXPERTS = 6
SCALES = {0: 1.0, 1: 0.5, 2: 2.0, 3: 1.0, 4: 0.25, 5: 3.0, 6: 0.5}
EXTRAS = (
    Extra(1, ExtraKind.BIAS, (12,)),
    Extra(3, ExtraKind.MATRIX, (8, 12)),
    Extra(5, ExtraKind.LORA_BIAS, (5,)),
)
KEY = make_key("a")


def write(
    path: Path,
    extras: tuple[Extra, ...] = EXTRAS,
    row_scales: dict[int, tuple[tuple[int, float], ...]] | None = None,
    key: AdapterKey = KEY,
    ranks: dict[int, int] = RANKS,
) -> Tensor:
    plan = BlockPlan(LAYOUT, ranks, extras)
    payload = torch.randn(plan.num_elements, generator=torch.Generator().manual_seed(0))
    with path.open("wb") as file:
        write_block_header(
            file,
            base_id="base",
            digest=key.digest,
            dtype="F32",
            scales=SCALES,
            plan=plan,
            row_scales=row_scales or {},
        )
        file.write(payload.numpy().tobytes())
    return payload


def matrices(values: Tensor, plan: BlockPlan, index: int) -> tuple[Tensor, Tensor]:
    a_offset, b_offset, rank = plan.table[index].tolist()
    part = plan.layout.slices[index]
    rows = rank * part.num_experts
    a = values[a_offset : a_offset + rows * part.in_features].view(rows, part.in_features)
    b = values[b_offset : b_offset + rows * part.out_features].view(rows, part.out_features)
    return a, b


def test_a_part_has_the_layouts_slices_with_its_own_sizes() -> None:
    sizes = [(part.name, part.in_features, part.out_features) for part in PART.layout.slices]
    expected = [("embed", 11, 8), ("q", 8, 6), ("k", 8, 2), ("o", 6, 8)]
    assert sizes == [*expected, ("down", WIDE - 3, 3), ("router", 8, 5), ("experts", 8, 6)]
    assert [part.num_experts for part in PART.layout.slices][-2:] == [1, 2]


def test_a_part_of_everything_is_the_layout_itself() -> None:
    assert LayoutPart(LAYOUT).layout is LAYOUT


def test_a_block_is_read_with_the_ranks_inputs_and_outputs_only(tmp_path: Path) -> None:
    payload = write(tmp_path / "block")
    cache = HostCache(LAYOUT, 4 << 20, torch.float32, part=PART)
    block = cache.read(KEY, tmp_path / "block")
    assert block is not None
    whole = BlockPlan(LAYOUT, RANKS, EXTRAS)
    own = PART.plan(RANKS, EXTRAS)
    assert block.num_elements == own.num_elements < whole.num_elements
    for index in set(RANKS) - {EXPERTS}:
        inputs, outputs = PART.range_of(index)
        a, b = matrices(payload, whole, index)
        own_a, own_b = matrices(block.tensor, own, index)
        assert torch.equal(own_a, a[:, inputs.start : inputs.stop])
        assert torch.equal(own_b, b[:, outputs.start : outputs.stop] * SCALES[index])


@pytest.mark.parametrize(
    "runs", [((8, 0.5),), ((3, 0.5), (5, 2.0)), ((2, 3.0), (2, 0.5), (3, 2.0), (1, 4.0))], ids=str
)
def test_a_block_is_read_with_the_ranks_experts_only(
    tmp_path: Path, runs: tuple[tuple[int, float], ...]
) -> None:
    """Two rows of A and B each, of experts 1 and 2. `runs`: rows of B that have the same scale."""
    payload = write(tmp_path / "block", row_scales={EXPERTS: runs})
    block = HostCache(LAYOUT, 4 << 20, torch.float32, part=PART).read(KEY, tmp_path / "block")
    assert block is not None
    a, b = matrices(payload, BlockPlan(LAYOUT, RANKS, EXTRAS), EXPERTS)
    own = PART.plan(RANKS, EXTRAS)
    own_a, own_b = matrices(block.tensor, own, EXPERTS)
    scales = torch.tensor([scale for num_rows, scale in runs for _ in range(num_rows)])
    assert torch.equal(own_a, a[2:6])
    assert torch.equal(own_b, (b * scales[:, None])[2:6])


def test_auxiliary_tensors_are_cut_like_the_slice_that_they_belong_to(tmp_path: Path) -> None:
    payload = write(tmp_path / "block")
    block = HostCache(LAYOUT, 4 << 20, torch.float32, part=PART).read(KEY, tmp_path / "block")
    assert block is not None
    whole = BlockPlan(LAYOUT, RANKS, EXTRAS).placed_auxiliary
    stored = [payload[p.offset : p.offset + p.extra.num_elements] for p in whole]
    expected = [stored[0][6:12], stored[1].view(8, 12)[:, 6:12].flatten(), stored[2]]
    for placed, values in zip(block.auxiliary, expected, strict=True):
        end = placed.offset + placed.extra.num_elements
        assert torch.equal(block.tensor[placed.offset : end], values)


@pytest.mark.parametrize(
    "extra",
    [Extra(1, ExtraKind.BIAS, (11,)), Extra(1, ExtraKind.TOKEN_ROWS, (1, 8), (3,))],
    ids=str,
)
def test_an_auxiliary_tensor_that_does_not_fit_its_slice_is_refused(
    tmp_path: Path, extra: Extra
) -> None:
    write(tmp_path / "block", (extra,))
    with pytest.raises(ObjectCorrupt, match="does not fit q"):
        HostCache(LAYOUT, 4 << 20, torch.float32, part=PART).read(KEY, tmp_path / "block")


ENDS = BaseLayout(
    "base",
    (
        Projection((Slice("embed", 50, 8, SliceKind.EMBEDDING),)),
        Projection((Slice("q", 8, 12),)),
        Projection((Slice("head", 8, 50),)),
    ),
)
TOKENS = (range(32), range(32, 50))
"""Of two ranks."""


def part_of_ends(rank: int) -> LayoutPart:
    embedding = SliceRange(TOKENS[rank], range(8))
    return LayoutPart(ENDS, {"embed": embedding, "head": SliceRange(range(8), TOKENS[rank])})


def read_ends(
    path: Path, extras: tuple[Extra, ...], ranks: dict[int, int]
) -> tuple[BlockPlan, Tensor, list[HostBlock]]:
    """The whole block's plan and values, and each rank's block."""
    plan = BlockPlan(ENDS, ranks, extras)
    payload = torch.randn(plan.num_elements, generator=torch.Generator().manual_seed(0))
    scales = dict.fromkeys(ranks, 1.0)
    with path.open("wb") as file:
        write_block_header(
            file, base_id="base", digest=KEY.digest, dtype="F32", scales=scales, plan=plan
        )
        file.write(payload.numpy().tobytes())
    blocks = []
    for rank in range(2):
        cache = HostCache(ENDS, 4 << 20, torch.float32, part=part_of_ends(rank))
        block = cache.read(KEY, path)
        assert block is not None
        blocks.append(block)
    return plan, payload, blocks


def test_each_rank_reads_its_tokens_of_the_ends_low_rank_matrices(tmp_path: Path) -> None:
    plan, payload, blocks = read_ends(tmp_path / "block", (), {0: 3, 2: 2})
    (a_embed, b_embed, _), _, (a_head, b_head, _) = plan.table.tolist()
    for tokens, block in zip(TOKENS, blocks, strict=True):
        size, own = len(tokens), block.table.tolist()
        held = slice(tokens.start, tokens.stop)
        by_token = payload[a_embed : a_embed + 150].view(50, 3)[held]
        assert torch.equal(block.tensor[own[0][0] :][: 3 * size].view(size, 3), by_token)
        assert torch.equal(block.tensor[own[0][1] :][:24], payload[b_embed : b_embed + 24])
        assert torch.equal(block.tensor[own[2][0] :][:16], payload[a_head : a_head + 16])
        outputs = payload[b_head : b_head + 100].view(2, 50)[:, held]
        assert torch.equal(block.tensor[own[2][1] :][: 2 * size].view(2, size), outputs)


@pytest.mark.parametrize("num_tokens", [20, 32, 40, 50, 57])
@pytest.mark.parametrize("end", [0, 2])
def test_each_rank_reads_its_rows_of_a_matrix_and_the_last_one_those_of_added_tokens(
    tmp_path: Path, end: int, num_tokens: int
) -> None:
    matrix = Extra(end, ExtraKind.MATRIX, (num_tokens, 8))
    plan, payload, blocks = read_ends(tmp_path / "block", (matrix,), {1: 1})
    (whole,) = plan.placed_auxiliary
    values = payload[whole.offset : whole.offset + 8 * num_tokens].view(num_tokens, 8)
    expected = [values[:32], values[32:]]
    for rows, block in zip(expected, blocks, strict=True):
        held = [
            block.tensor[placed.offset : placed.offset + placed.extra.num_elements].view(-1, 8)
            for placed in block.auxiliary
        ]
        assert len(held) == bool(len(rows))
        assert all(torch.equal(own, rows) for own in held)


@pytest.mark.parametrize("end", [0, 2])
def test_each_rank_reads_the_rows_of_its_trained_tokens_counted_from_its_first(
    tmp_path: Path, end: int
) -> None:
    tokens = (3, 31, 32, 49, 50, 52)
    extra = Extra(end, ExtraKind.TOKEN_ROWS, (6, 8), tokens)
    plan, payload, blocks = read_ends(tmp_path / "block", (extra,), {1: 1})
    (whole,) = plan.placed_auxiliary
    values = payload[whole.offset : whole.offset + 48].view(6, 8)
    for block, ids, rows in zip(
        blocks, ((3, 31), (0, 17, 18, 20)), (values[:2], values[2:]), strict=True
    ):
        (placed,) = block.auxiliary
        assert placed.extra.token_ids == ids
        end_at = placed.offset + placed.extra.num_elements
        assert torch.equal(block.tensor[placed.offset : end_at].view(-1, 8), rows)


def test_every_rank_knows_the_vocabulary_of_an_adapter_that_adds_tokens(tmp_path: Path) -> None:
    """The first one holds none of its rows."""
    extras = tuple(Extra(end, ExtraKind.TOKEN_ROWS, (2, 8), (50, 51)) for end in (0, 2))
    _, _, blocks = read_ends(tmp_path / "block", extras, {1: 1})
    assert [block.vocab_size for block in blocks] == [52, 52]
    assert [len(block.auxiliary) for block in blocks] == [0, 2]


OTHER = make_key("b")
OTHER_RANKS = {0: 3, 1: 2, 4: 1, 5: 2, 6: 4}
"""Slices 2 and 3 are the first adapter's alone."""


def delta(values: Tensor, plan: BlockPlan, index: int) -> Tensor:
    """B·A of a slice `[experts, out, in]`, in fp64."""
    a, b = (each.double() for each in matrices(values, plan, index))
    layer, rank = plan.layout.slices[index], plan.ranks[index]
    if layer.kind is SliceKind.EMBEDDING:
        a = a.flatten().view(layer.in_features, rank).T
    a, b = (each.reshape(layer.num_experts, rank, -1) for each in (a, b))
    return b.mT @ a


@pytest.mark.parametrize("part", [LayoutPart(LAYOUT), PART], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_composition_is_the_weighted_sum_of_its_members(
    tmp_path: Path, part: LayoutPart, dtype: torch.dtype
) -> None:
    """Of each slice, each expert and each part; `row_scales` of one member only."""
    write(tmp_path / "a", extras=(), row_scales={EXPERTS: ((3, 0.5), (5, 2.0))})
    write(tmp_path / "b", extras=(), key=OTHER, ranks=OTHER_RANKS)
    composed = composed_key(KEY.tenant_id, {KEY.digest: 0.25, OTHER.digest: -1.5})
    paths = {KEY.digest: tmp_path / "a", OTHER.digest: tmp_path / "b"}
    cache = HostCache(LAYOUT, 8 << 20, dtype, part=part)
    block = cache.read(composed, *(paths[member.digest] for member in composed.members))
    assert block is not None
    alone = [cache.read(key, paths[key.digest]) for key in (KEY, OTHER)]
    plans = [part.plan(ranks, ()) for ranks in (RANKS, OTHER_RANKS)]
    joined = part.plan({i: RANKS[i] + OTHER_RANKS.get(i, 0) for i in RANKS}, ())
    assert torch.equal(torch.from_numpy(block.table), torch.from_numpy(joined.table))
    for index in RANKS:
        expected = sum(
            weight * delta(each.tensor, plan, index)
            for each, plan, weight in zip(alone, plans, (0.25, -1.5), strict=True)
            if each is not None and index in plan.ranks
        )
        assert isinstance(expected, Tensor)
        error = (delta(block.tensor, joined, index) - expected).abs().max()
        assert error < (1e-5 if dtype is torch.float32 else 0.3), index


def test_a_composition_with_auxiliary_tensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", extras=(), key=OTHER, ranks=OTHER_RANKS)
    composed = composed_key(KEY.tenant_id, {KEY.digest: 1.0, OTHER.digest: 1.0})
    paths = {KEY.digest: tmp_path / "a", OTHER.digest: tmp_path / "b"}
    cache = HostCache(LAYOUT, 8 << 20, torch.float32)
    with pytest.raises(NotComposable):
        cache.read(composed, *(paths[member.digest] for member in composed.members))
    assert cache.used_bytes == 0
