"""Codes of 4 and 2 bits in groups, against KIVI's formula; attention that reads them by blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.kernels.attention import AttentionOptions, paged_attention
from loraplex.kernels.attention_window import AttentionWindow
from loraplex.kernels.kv_groups import (
    NOT_OPEN,
    GroupedPages,
    OpenBlocks,
    block_bytes,
    dequantize_blocks,
    num_value_groups,
    quantize_blocks,
    stack_grouped_pages,
)
from loraplex.kernels.kv_pages import write_pages

CPU = torch.device("cpu")
BITS = [4, 2]
BLOCK, HEADS, DIM, VALUE_DIM = 8, 2, 12, 20


def kivi(group: Tensor, bits: int) -> Tensor:
    """The formula of Liu et al. 2024, section 3: `Q = round((X - z) / s)`, `X' = Q s + z` with
    `z = min X` and `s = (max X - min X) / (2^bits - 1)`, for one group."""
    zero = group.min()
    scale = (group.max() - zero) / (2**bits - 1)
    read: Tensor = ((group - zero) / scale).round() * scale + zero
    return read


def kivi_blocks(blocks: Tensor, bits: int, *, is_key: bool) -> Tensor:
    """Keys `[n, block_size, heads, dim]` by channels, values by tokens and 64 channels."""
    out = blocks.clone()
    num_blocks, block_size, num_heads, dim = blocks.shape
    for block in range(num_blocks):
        for head in range(num_heads):
            if is_key:
                for channel in range(dim):
                    column = blocks[block, :, head, channel]
                    out[block, :, head, channel] = kivi(column, bits)
                continue
            for token in range(block_size):
                for first in range(0, dim, 64):
                    part = slice(first, first + 64)
                    row = blocks[block, token, head, part]
                    out[block, token, head, part] = kivi(row, bits)
    return out


def read_back(blocks: Tensor, bits: int, *, is_key: bool) -> Tensor:
    codes, steps = quantize_blocks(blocks, bits=bits, is_key=is_key)
    out = torch.full_like(blocks, 7.0)
    dequantize_blocks(codes, steps, out, bits=bits, is_key=is_key)
    return out


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("offset", [0.0, 20.0, -20.0])
def test_codes_are_those_of_kivi(bits: int, is_key: bool, offset: float) -> None:
    blocks = torch.randn(1, 64, 1, 128, generator=torch.Generator().manual_seed(0))
    blocks[..., 5] += offset  # an outlier channel
    ours, theirs = read_back(blocks, bits, is_key=is_key), kivi_blocks(blocks, bits, is_key=is_key)
    axis = 1 if is_key else -1
    groups = blocks if is_key else blocks.unflatten(-1, (2, 64))
    ranges = groups.amax(axis, keepdim=True) - groups.amin(axis, keepdim=True)
    lowest = groups.amin(axis, keepdim=True).abs()
    step = (ranges + lowest / 128) / (2**bits - 1) * (1 + 1 / 128)
    step = step.expand_as(groups).reshape(blocks.shape)
    assert ((ours - blocks).abs() <= step / 2 * (1 + 1e-5) + 1e-6).all()
    # Rounded steps only change which of two neighbouring codes is the nearest.
    assert ((ours - theirs).abs() <= step * 1.05).all()
    plain, mine = (theirs - blocks).square().mean(), (ours - blocks).square().mean()
    assert mine < plain * 1.05


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_groups_do_not_touch_each_other(bits: int, is_key: bool) -> None:
    blocks = torch.randn(1, 8, 2, 128, generator=torch.Generator().manual_seed(1))
    before = read_back(blocks, bits, is_key=is_key)
    changed = blocks.clone()
    changed[0, 3, 1, 70] = 1000.0
    after = read_back(changed, bits, is_key=is_key)
    touched = torch.zeros_like(blocks, dtype=torch.bool)
    touched[(0, slice(None), 1, 70) if is_key else (0, 3, 1, slice(64, 128))] = True
    assert torch.equal(before[~touched], after[~touched])
    assert abs(after[0, 3, 1, 70].item() - 1000.0) < 16


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_equal_and_empty_groups_are_kept(bits: int, is_key: bool) -> None:
    for value in (0.0, -3.0, 0.1, 1e-30, 1e30):
        blocks = torch.full((1, 8, 1, 16), value)
        read = read_back(blocks, bits, is_key=is_key)
        assert torch.allclose(read, blocks, rtol=2**-8, atol=1e-36)
    codes, steps = torch.zeros(1, bits, 1, 16, dtype=torch.uint8), torch.zeros(1, 2, 1, 16)
    out = torch.full((1, 8, 1, 16), 7.0)
    dequantize_blocks(codes, steps.bfloat16(), out, bits=bits, is_key=True)
    assert not out.any(), "a block of zeros reads as zeros"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_key", [True, False], ids=["keys", "values"])
def test_a_group_that_is_not_finite_reads_as_not_finite(bad: float, is_key: bool) -> None:
    blocks = torch.randn(1, 8, 2, 64)
    blocks[0, 2, 1, 9] = bad
    read = read_back(blocks, 4, is_key=is_key)
    own = read[0, :, 1, 9] if is_key else read[0, 2, 1]
    assert not own.isfinite().any()
    assert (~read.isfinite()).sum() == own.numel()


def test_channels_are_cut_into_equal_groups() -> None:
    sizes = [16, 64, 80, 96, 128, 192, 576]
    assert [num_value_groups(dim) for dim in sizes] == [1, 1, 2, 2, 2, 3, 9]


class Layer:
    """One layer's pages, every block open forever unless `num_slots` says how many."""

    def __init__(self, bits: int, num_blocks: int) -> None:
        self.blocks = OpenBlocks(num_blocks, None, CPU)
        self.keys, self.values = (
            stack_grouped_pages(
                1,
                (num_blocks, BLOCK, HEADS, dim),
                dtype=torch.float32,
                bits=bits,
                is_key=is_key,
                blocks=self.blocks,
                device=CPU,
            ).pages[0]
            for is_key, dim in ((True, DIM), (False, VALUE_DIM))
        )


def reference(
    q: Tensor, k: Tensor, v: Tensor, position: int, bits: int, options: AttentionOptions
) -> Tensor:
    """One query's attention: its own block as it is, complete blocks before it quantized."""
    own = position // BLOCK * BLOCK
    parts = []
    for vectors, is_key in ((k, True), (v, False)):
        before = vectors[:own].unflatten(0, (-1, BLOCK))
        closed = read_back(before, bits, is_key=is_key).flatten(0, 1) if own else vectors[:0]
        parts.append(torch.cat([closed, vectors[own : position + 1]]))
    keys, values = parts
    first = 0 if options.window is None else options.window.first_visible(position)
    seen = [p for p in range(position + 1) if p >= first or p < options.num_sink_positions]
    num_shared = q.shape[0] // HEADS
    out = []
    for head in range(q.shape[0]):
        scores = keys[seen, head // num_shared] @ q[head] * options.scale
        out.append(scores.softmax(0) @ values[seen, head // num_shared])
    return torch.stack(out)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("window", [None, AttentionWindow(11), AttentionWindow(11, True)], ids=str)
@pytest.mark.parametrize("cuts", [[25, 1, 1, 5, 3], [35]], ids=len)
def test_a_query_reads_its_own_block_as_computed_and_those_before_as_codes(
    bits: int, window: AttentionWindow | None, cuts: Sequence[int]
) -> None:
    """However the sequences are cut, alone and beside others."""
    generator = torch.Generator().manual_seed(2)
    length, layer = sum(cuts), Layer(bits, num_blocks=17)
    sinks = 0 if window is None else 3
    group = KvGroup((0,), window, sinks, num_blocks=17)
    options = AttentionOptions(0.3, window=window, num_sink_positions=sinks)
    draw = [(4, DIM), (HEADS, DIM), (HEADS, VALUE_DIM)]
    texts = [[torch.randn(length, *size, generator=generator) for size in draw] for _ in range(2)]
    order = torch.randperm(16, generator=generator) + 1
    tables = [block_table(order[:8].tolist()), block_table(order[8:].tolist())]
    done = [0, 0]
    lengths = [list(cuts), list(reversed(cuts))]
    for step in range(len(cuts)):
        counts = [own[step] for own in lengths]
        chunks = [SequenceChunk([0] * counts[i], done[i], [tables[i]]) for i in range(len(counts))]
        inputs = make_inputs(chunks, groups=[group], block_size=BLOCK, device=CPU)
        q, k, v = (
            torch.cat([texts[i][part][done[i] : done[i] + counts[i]] for i in range(2)])
            for part in range(3)
        )
        (batch,) = inputs.attention
        write_pages(layer.keys, layer.values, batch.slot_mapping, k, v)
        out = paged_attention(q, layer.keys, layer.values, batch, options)
        row = 0
        for i in range(2):
            for position in range(done[i], done[i] + counts[i]):
                own_q, own_k, own_v = texts[i]
                expected = reference(own_q[position], own_k, own_v, position, bits, options)
                assert torch.allclose(out[row], expected, atol=2e-6), (i, position)
                row += 1
            done[i] += counts[i]


@pytest.mark.parametrize("bits", BITS)
def test_a_draft_token_that_is_replaced_leaves_no_trace(bits: int) -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(BLOCK, HEADS, DIM, generator=generator)
    plain, drafted = (Layer(bits, num_blocks=3).keys for _ in range(2))
    slots = torch.arange(BLOCK, 2 * BLOCK)
    plain.write(slots, vectors)
    wrong = 100 * torch.randn(5, HEADS, DIM, generator=generator)
    drafted.write(slots[:4], vectors[:4])
    drafted.write(torch.arange(BLOCK + 4, 2 * BLOCK + 1), wrong)  # they complete the block
    drafted.write(slots[4:6], vectors[4:6])
    drafted.write(slots[6:], vectors[6:])
    for ours, theirs in zip(drafted.tensors, plain.tensors, strict=True):
        assert torch.equal(ours[1], theirs[1])


def test_a_complete_block_is_never_written() -> None:
    blocks = OpenBlocks(5, 2, CPU)
    blocks.open([3, 1], [2, 1])
    places = blocks.places(torch.tensor([3 * BLOCK + 7, BLOCK]), BLOCK)
    assert places.written.tolist() == [2 * BLOCK + 7, BLOCK]
    assert (places.complete.tolist(), places.complete_slots.tolist()) == ([3], [2])
    address = blocks.slots.data_ptr()
    blocks.open([4], [2])  # the slot of block 3
    assert blocks.slots.data_ptr() == address, "captured steps read it there"
    assert (blocks.slot(3), blocks.slot(4)) == (NOT_OPEN, 2)
    assert blocks.slots.tolist() == [NOT_OPEN, 1, NOT_OPEN, NOT_OPEN, 2]
    with pytest.raises(AssertionError, match="complete"):
        blocks.places(torch.tensor([3 * BLOCK]), BLOCK)


def test_bytes_are_those_of_the_tensors() -> None:
    for bits in BITS:
        layer = Layer(bits, num_blocks=3)
        for pages, dim, is_key in ((layer.keys, DIM, True), (layer.values, VALUE_DIM, False)):
            assert isinstance(pages, GroupedPages)
            taken = sum(tensor.nbytes for tensor in pages.tensors)
            assert taken == 3 * block_bytes(BLOCK, HEADS, dim, bits=bits, is_key=is_key)
