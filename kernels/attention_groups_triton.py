"""Attention over pages of `kv_groups` in Triton, with grids that captured steps can hold.

As in `attention_triton`, a program processes a sequence, a key/value head, a tile of the queries
that share it and a split of the keys. It walks the keys twice: first the blocks before a query's
own, as codes, then its own, open. Each walk shows a query only the blocks that it reads in that
form, and both add to one running softmax. So where a tile's queries lie in several blocks, these
blocks are read in both forms, and otherwise every block in one.

A tile of keys lies in one block: its steps are loaded once, and its numbers are made in registers.
Codes that tokens share a byte for are loaded once for each of them, from the processor's caches.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import AttentionOptions, SequenceGroup
from .attention_triton import (
    COMBINE_OPTIONS,
    LOG2_E,
    MAX_SPLITS,
    MIN_BLOCK,
    SPLIT_KEYS,
    AttentionShape,
    combine_constants,
    combine_kernel,
    first_visible,
    num_blocks_before,
)
from .kv_groups import GroupedPages, num_value_groups


def attend_group(
    q: Tensor,
    out: Tensor,
    keys: GroupedPages,
    values: GroupedPages,
    group: SequenceGroup,
    options: AttentionOptions,
) -> None:
    """Write the group's rows of `out [num_tokens, num_heads, value_dim]`, which is dense.

    q `[num_tokens, num_heads, dim]`, its last axis dense.
    """
    assert group.hidden is None, "a tree's tokens are not in the order of their positions"
    num_sequences, num_rows = group.rows.shape
    num_heads, num_blocks = q.shape[1], group.block_tables.shape[1]
    shape = grouped_shape(num_rows, num_blocks, keys, values, num_heads=num_heads)
    partial, weights = out, None
    if shape.num_splits > 1:
        size = (num_sequences * num_rows, num_heads, shape.num_splits)
        partial = torch.empty(*size, values.dim, dtype=torch.float32, device=q.device)
        weights = torch.empty(size, dtype=torch.float32, device=q.device)
    attend_groups_kernel[(num_sequences * keys.num_heads, shape.num_tiles, shape.num_splits)](
        partial,
        weights,
        q,
        *(keys.data, keys.scales, keys.opened),
        *(values.data, values.scales, values.opened),
        keys.blocks.slots,
        options.sinks,
        options.slopes,
        group.rows,
        group.positions,
        group.block_tables,
        group.block_positions,
        num_rows,
        num_blocks,
        q.stride(0),
        q.stride(1),
        **attend_constants(shape, keys, values, options, num_heads=num_heads),
        **attend_options(shape, q.dtype),
    )
    if weights is not None:
        combine_kernel[(num_sequences * num_rows, num_heads)](
            out,
            partial,
            weights,
            group.rows,
            shape.num_splits,
            **combine_constants(shape.num_splits, values.dim),
            **COMBINE_OPTIONS,
        )


def grouped_shape(
    num_rows: int,
    num_blocks: int,
    keys: GroupedPages,
    values: GroupedPages,
    *,
    num_heads: int,
) -> AttentionShape:
    """The shape for sequences of up to `num_rows` new tokens and `num_blocks` blocks."""
    is_exact = keys.opened.dtype.itemsize == 4  # fp32 is multiplied without tensor cores
    num_queries, block_size = num_rows * num_heads // keys.num_heads, keys.block_size
    most_queries = MIN_BLOCK if is_exact else 32
    block_queries = min(max(triton.next_power_of_2(num_queries), MIN_BLOCK), most_queries)
    block_keys = 32 if is_exact else 64
    if max(keys.dim, values.dim) > 128:
        block_keys //= 2
    block_keys = min(block_keys, max(triton.next_power_of_2(block_size), MIN_BLOCK))
    num_tiles = triton.cdiv(num_queries, block_queries)
    if num_tiles > 1:
        return AttentionShape(block_queries, block_keys, num_tiles, 1)
    # The blocks that several tokens lie in count twice, once in each form.
    num_read = num_blocks + triton.cdiv(num_rows - 1, block_size)
    key_tiles = num_read * triton.cdiv(block_size, block_keys)
    num_splits = min(triton.cdiv(key_tiles, split_tiles(block_keys, block_size)), MAX_SPLITS)
    return AttentionShape(block_queries, block_keys, num_tiles, num_splits)


def split_tiles(block_keys: int, block_size: int) -> int:
    """The tiles of `SPLIT_KEYS` keys; none reaches into another block."""
    return SPLIT_KEYS // min(block_keys, block_size)


def attend_constants(
    shape: AttentionShape,
    keys: GroupedPages,
    values: GroupedPages,
    options: AttentionOptions,
    *,
    num_heads: int,
) -> dict[str, Any]:
    """The compile-time values of `attend_groups_kernel`."""
    return {
        "NUM_KV_HEADS": keys.num_heads,
        "SHARED": num_heads // keys.num_heads,
        "BLOCK_SIZE": keys.block_size,
        "BITS": keys.bits,
        "DIM": keys.dim,
        "VALUE_DIM": values.dim,
        "NUM_VALUE_GROUPS": num_value_groups(values.dim),
        "SCALE": options.scale,
        "SOFTCAP": options.softcap,
        "WINDOW": options.window and options.window.size,
        "IS_CHUNKED": options.window is not None and options.window.is_chunked,
        "SINK_POSITIONS": options.num_sink_positions,
        "SPLIT_TILES": split_tiles(shape.block_keys, keys.block_size),
        "BLOCK_QUERIES": shape.block_queries,
        "BLOCK_KEYS": shape.block_keys,
        "BLOCK_DIM": max(triton.next_power_of_2(keys.dim), MIN_BLOCK),
        "BLOCK_VALUE": max(triton.next_power_of_2(values.dim), MIN_BLOCK),
        "UPCAST": INTERPRETED,
    }


def attend_options(shape: AttentionShape, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time values of `attend_groups_kernel`."""
    if dtype.itemsize == 4:
        return {"num_warps": 16 if shape.block_keys < 32 else 8, "num_stages": 1}
    is_large = shape.block_queries > MIN_BLOCK
    # Prompts of vectors as wide as this would spill on sm_80.
    num_stages = 1 if is_large and shape.block_keys < 64 else 2
    return {"num_warps": 8 if is_large else 4, "num_stages": num_stages}


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def attend_groups_kernel(
    out_ptr: tl.tensor,  # [num_tokens, num_heads, VALUE_DIM], or fp32 [rows, heads, splits, ...]
    weights_ptr: tl.tensor,  # fp32 [rows, heads, splits]: log2 of each split's sum; None: no splits
    q_ptr: tl.tensor,
    key_codes_ptr: tl.tensor,  # uint8 [blocks, BLOCK_SIZE * BITS / 8, NUM_KV_HEADS, DIM]
    key_steps_ptr: tl.tensor,  # bf16 [blocks, 2, NUM_KV_HEADS, DIM]
    open_keys_ptr: tl.tensor,  # [open slots, BLOCK_SIZE, NUM_KV_HEADS, DIM]
    value_codes_ptr: tl.tensor,
    value_steps_ptr: tl.tensor,  # bf16 [blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, NUM_VALUE_GROUPS]
    open_values_ptr: tl.tensor,
    open_slots_ptr: tl.tensor,  # int64 [blocks]
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,  # fp32 [heads]
    rows_ptr: tl.tensor,  # int64 [sequences, num_rows], positions alike
    positions_ptr: tl.tensor,
    tables_ptr: tl.tensor,  # int64 [sequences, num_blocks], block positions alike
    block_positions_ptr: tl.tensor,
    num_rows: int,
    num_blocks: int,
    q_token_stride: int,
    q_head_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_VALUE_GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SINK_POSITIONS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Softmax attention of one tile of queries over one split of its sequence's keys."""
    sequence = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last sees most: it starts first
    split = tl.program_id(2)

    queries = tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    indices = queries // SHARED
    heads = kv_head * SHARED + queries % SHARED
    inside = indices < num_rows
    places = sequence * num_rows + indices
    rows = tl.load(rows_ptr + places, mask=inside, other=-1)
    positions = tl.load(positions_ptr + places, mask=inside, other=-1).to(tl.int32)
    last = tl.max(positions)
    lowest = tl.min(tl.where(positions < 0, last, positions))
    own_blocks = tl.where(positions < 0, -1, positions // BLOCK_SIZE)

    # Entries of the block table: the queries' own blocks, the first that a window shows, sinks.
    tables_ptr += sequence.to(tl.int64) * num_blocks
    first = 0
    num_sinks = 0
    if block_positions_ptr is None:
        first_own = lowest // BLOCK_SIZE
        last_own = last // BLOCK_SIZE
        if WINDOW is not None:
            first = tl.maximum(first_visible(lowest, WINDOW, IS_CHUNKED), 0) // BLOCK_SIZE
    else:
        begins_ptr = block_positions_ptr + sequence.to(tl.int64) * num_blocks
        first_own = num_blocks_before(begins_ptr, num_blocks, lowest + 1) - 1
        last_own = num_blocks_before(begins_ptr, num_blocks, last + 1) - 1
        if WINDOW is not None:
            seen_from = first_visible(lowest, WINDOW, IS_CHUNKED)
            first = num_blocks_before(begins_ptr, num_blocks, seen_from - BLOCK_SIZE + 1)
    if SINK_POSITIONS > 0:
        num_sinks = tl.minimum((SINK_POSITIONS + BLOCK_SIZE - 1) // BLOCK_SIZE, first)

    BLOCK_TILES: tl.constexpr = (BLOCK_SIZE + BLOCK_KEYS - 1) // BLOCK_KEYS
    num_coded_tiles = (num_sinks + last_own - first) * BLOCK_TILES
    num_open_tiles = (last_own - first_own) * BLOCK_TILES + last % BLOCK_SIZE // BLOCK_KEYS + 1
    num_coded_tiles = tl.where(last < 0, 0, num_coded_tiles)
    num_tiles = tl.where(last < 0, 0, num_coded_tiles + num_open_tiles)
    # The number of splits depends on the sequence's own keys, not on the others' or on the width of
    # the tables.
    split_tiles = (num_tiles + tl.num_programs(2) - 1) // tl.num_programs(2)
    split_tiles = tl.maximum(split_tiles, SPLIT_TILES)
    first_tile = split * split_tiles
    last_tile = tl.minimum(first_tile + split_tiles, num_tiles)

    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE)
    is_query = positions >= 0
    q_rows_ptr = q_ptr + rows[:, None] * q_token_stride + (heads * q_head_stride)[:, None]
    q = tl.load(
        q_rows_ptr + dims[None, :], mask=is_query[:, None] & (dims < DIM)[None, :], other=0.0
    )
    dtype = q.dtype
    if UPCAST:
        q = q.to(tl.float32)
    largest = tl.full((BLOCK_QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.full((BLOCK_QUERIES,), 0.0, dtype=tl.float32)
    if sinks_ptr is not None:
        # A logit without a value; of all splits the first counts it.
        sinks = tl.load(sinks_ptr + heads, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.where(split == 0, sinks, largest)
        total += tl.where(split == 0, 1.0, 0.0)
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + heads, mask=inside, other=0.0) * LOG2_E
    acc = tl.full((BLOCK_QUERIES, BLOCK_VALUE), 0.0, dtype=tl.float32)
    for is_open in tl.static_range(2):
        tile_before = tl.maximum(first_tile, num_coded_tiles) if is_open else first_tile
        tile_after = last_tile if is_open else tl.minimum(last_tile, num_coded_tiles)
        # Start at zero: a loop whose start depends on a loaded value is pipelined badly by Triton,
        # and spills.
        for step in range(0, tile_after - tile_before):
            key_tile = tile_before + step
            if is_open:
                key_tile -= num_coded_tiles
                entry = first_own + key_tile // BLOCK_TILES
            else:
                entry = key_tile // BLOCK_TILES
                entry += tl.where(entry < num_sinks, 0, first - num_sinks)
            page = tl.load(tables_ptr + entry)
            block = entry
            if block_positions_ptr is not None:
                block = tl.load(begins_ptr + entry).to(tl.int32) // BLOCK_SIZE
            offsets = key_tile % BLOCK_TILES * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            key_positions = block * BLOCK_SIZE + offsets
            is_read = offsets < BLOCK_SIZE
            if is_open:
                is_read &= key_positions <= last
                visible = key_positions[None, :] <= positions[:, None]
                visible &= (own_blocks == block)[:, None] & is_read[None, :]
            else:
                visible = (own_blocks > block)[:, None] & is_read[None, :]
            if WINDOW is not None:
                from_position = first_visible(positions, WINDOW, IS_CHUNKED)
                near = key_positions[None, :] >= from_position[:, None]
                visible &= near | (key_positions < SINK_POSITIONS)[None, :]
            if is_open:
                opened = tl.load(open_slots_ptr + page)
                vectors = (opened * BLOCK_SIZE + offsets) * NUM_KV_HEADS + kv_head
                k = tl.load(
                    open_keys_ptr + vectors[None, :] * DIM + dims[:, None],
                    mask=is_read[None, :] & (dims < DIM)[:, None],
                    other=0.0,
                )
            else:
                k = _codes(
                    key_codes_ptr,
                    page,
                    kv_head,
                    offsets[None, :],
                    dims[:, None],
                    is_read[None, :] & (dims < DIM)[:, None],
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    BITS,
                    DIM,
                )
                step_ptrs = key_steps_ptr + (page * 2 * NUM_KV_HEADS + kv_head) * DIM + dims
                steps = tl.load(step_ptrs, mask=dims < DIM, other=0.0).to(tl.float32)
                step_ptrs += NUM_KV_HEADS * DIM
                smallest = tl.load(step_ptrs, mask=dims < DIM, other=0.0).to(tl.float32)
                k = k * steps[:, None] + smallest[:, None]
            scores = tl.dot(q, k.to(dtype).to(q.dtype), input_precision="ieee")
            # Exponentials are powers of two: scores in units of log 2, unless they are capped
            # first.
            scores *= SCALE if SOFTCAP is not None else SCALE * LOG2_E
            if SOFTCAP is not None:
                # tanh, of the absolute value: nothing overflows.
                shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / SOFTCAP))
                capped = (1.0 - shrunk) / (1.0 + shrunk) * SOFTCAP
                scores = tl.where(scores < 0, -capped, capped) * LOG2_E
            if slopes_ptr is not None:
                distances = key_positions[None, :] - positions[:, None]
                scores += slopes[:, None] * distances.to(tl.float32)
            scores = tl.where(visible, scores, float("-inf"))

            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(scores - shift[:, None])
            fading = tl.exp2(largest - shift)
            total = total * fading + tl.sum(weights, axis=1)
            largest = new_largest
            acc *= fading[:, None]
            if is_open:
                v = tl.load(
                    open_values_ptr + vectors[:, None] * VALUE_DIM + value_dims[None, :],
                    mask=is_read[:, None] & (value_dims < VALUE_DIM)[None, :],
                    other=0.0,
                )
            else:
                v = _codes(
                    value_codes_ptr,
                    page,
                    kv_head,
                    offsets[:, None],
                    value_dims[None, :],
                    is_read[:, None] & (value_dims < VALUE_DIM)[None, :],
                    NUM_KV_HEADS,
                    BLOCK_SIZE,
                    BITS,
                    VALUE_DIM,
                )
                vectors = (page * 2 * BLOCK_SIZE + offsets) * NUM_KV_HEADS + kv_head
                step_ptrs = value_steps_ptr + vectors * NUM_VALUE_GROUPS
                smallest_ptrs = step_ptrs + BLOCK_SIZE * NUM_KV_HEADS * NUM_VALUE_GROUPS
                steps = tl.load(step_ptrs, mask=is_read, other=0.0).to(tl.float32)[:, None]
                smallest = tl.load(smallest_ptrs, mask=is_read, other=0.0).to(tl.float32)[:, None]
                for index in tl.static_range(1, NUM_VALUE_GROUPS):
                    is_here = (value_dims >= index * (VALUE_DIM // NUM_VALUE_GROUPS))[None, :]
                    own = tl.load(step_ptrs + index, mask=is_read, other=0.0).to(tl.float32)
                    steps = tl.where(is_here, own[:, None], steps)
                    own = tl.load(smallest_ptrs + index, mask=is_read, other=0.0).to(tl.float32)
                    smallest = tl.where(is_here, own[:, None], smallest)
                v = v * steps + smallest
            weights = weights.to(dtype).to(q.dtype)
            acc = tl.dot(weights, v.to(dtype).to(q.dtype), acc, input_precision="ieee")

    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    acc /= total[:, None]
    heads_of_all = NUM_KV_HEADS * SHARED
    if weights_ptr is None:
        out_rows = rows * heads_of_all + heads
        is_stored = inside & (rows >= 0)
    else:
        out_rows = (places.to(tl.int64) * heads_of_all + heads) * tl.num_programs(2) + split
        is_stored = inside
        log_total = tl.where(is_empty, float("-inf"), largest + tl.log2(total))
        tl.store(weights_ptr + out_rows, log_total, mask=is_stored)
        is_stored = inside & (is_empty == 0)
    tl.store(
        out_ptr + out_rows[:, None] * VALUE_DIM + value_dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_stored[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit
def _codes(
    codes_ptr: tl.tensor,
    page: tl.tensor,
    kv_head: tl.tensor,
    offsets: tl.tensor,
    dims: tl.tensor,
    inside: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """fp32: the codes of a block's tokens at these offsets. A byte holds tokens that are ROWS
    apart."""
    ROWS: tl.constexpr = BLOCK_SIZE * BITS // 8
    places = ((page * ROWS + offsets % ROWS) * NUM_KV_HEADS + kv_head) * DIM + dims
    packed = tl.load(codes_ptr + places, mask=inside, other=0).to(tl.int32)
    return ((packed >> (offsets // ROWS * BITS)) & ((1 << BITS) - 1)).to(tl.float32)


INTERPRETED = not isinstance(attend_groups_kernel, triton.JITFunction)
"""As in `attention_triton`."""
