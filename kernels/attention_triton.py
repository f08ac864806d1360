"""Paged attention in Triton: one kernel for decoding, verification and prompts.

A program processes a sequence, a key/value head, and a tile of the queries that share it: the
sequence's new tokens times the query heads of that head. It walks the sequence's blocks through its
block table, keeps a running softmax, and reads only keys that one of its queries can see. With few
queries, the context is cut into splits of a fixed number of keys, and a second kernel combines the
splits in order: no atomics, so results are bit-identical in any batch.

Everything that changes from step to step is read from device memory, so a grid sized by the tables'
capacity can be captured; a program without work ends at once. Quantized keys and values are
multiplied as codes; their scales are applied to the scores and the attention weights.

Values that are the first elements of the keys (`KeyPrefix`) are read once for both products. The
rest of the keys is a second, narrow product of the scores.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import AttentionOptions, SequenceGroup
from .kv_pages import KeyPrefix, KvPages, block_strides

SPLIT_KEYS = 512
"""Keys worth a program where queries are few."""
MAX_SPLITS = 32
"""Bounds the memory for partial results; longer contexts have longer splits."""
MAX_LATENT_SPLITS = 8
"""The same for latents: 128 heads of 512 elements take 2 MiB per sequence."""
LATENT_SPLIT_QUERIES = 128
"""Up to this number of queries a latent's keys are split although the queries are several tiles:
so are those of one token with DeepSeek-V3's heads."""
MIN_BLOCK = 16  # tl.dot's smallest
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_UNIT = tl.constexpr(1e-20)
"""Far below the smallest fp16 number, and far above where fp32's reciprocals overflow."""
COMBINE_OPTIONS: dict[str, Any] = {"num_warps": 1}


class AttentionShape(NamedTuple):
    """How a group's queries and keys are divided."""

    block_queries: int
    block_keys: int
    num_tiles: int
    """The number of query tiles, each of up to `block_queries` pairs of token and head."""
    num_splits: int
    """The maximum number of key splits; a sequence uses as many as have `SPLIT_KEYS` keys."""
    is_latent: bool = False
    """The values are parts of the keys."""


def attend_group(
    q: Tensor,
    out: Tensor,
    keys: KvPages,
    values: KvPages,
    group: SequenceGroup,
    options: AttentionOptions,
) -> None:
    """Write the group's rows of `out [num_tokens, num_heads, value_dim]`, which is dense.

    q `[num_tokens, num_heads, dim]`, its last axis dense.
    """
    num_sequences, num_rows = group.rows.shape
    num_heads, num_blocks = q.shape[1], group.block_tables.shape[1]
    shape = attention_shape(
        num_rows * num_heads // keys.num_heads,
        num_blocks * keys.block_size,
        has_sinks=options.num_sink_positions > 0,
        is_tree=group.hidden is not None,
        dim=max(keys.dim, values.dim),
        dtype=q.dtype,
        is_latent=isinstance(values, KeyPrefix),
    )
    is_whole = shape.num_splits == 1
    partial, weights = out, None
    if not is_whole:
        size = (num_sequences * num_rows, num_heads, shape.num_splits)
        partial = torch.empty(*size, values.dim, dtype=torch.float32, device=q.device)
        weights = torch.empty(size, dtype=torch.float32, device=q.device)
    attend_kernel[(num_sequences * keys.num_heads, shape.num_tiles, shape.num_splits)](
        partial,
        weights,
        q,
        keys.data,
        keys.scales,
        None if isinstance(values, KeyPrefix) else values.data,
        values.scales,
        options.sinks,
        options.slopes,
        group.rows,
        group.positions,
        group.block_tables,
        group.block_positions,
        group.hidden,
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


def attention_shape(
    num_queries: int,
    num_keys: int,
    *,
    has_sinks: bool,
    is_tree: bool,
    dim: int,
    dtype: torch.dtype,
    is_latent: bool = False,
) -> AttentionShape:
    """The shape for sequences of up to `num_queries` pairs of token and head and `num_keys` keys.

    has_sinks: whether positions before the window are visible, which begin with their own tile.
    is_latent: whether all values are parts of keys, which many heads share then.
    """
    is_wide, is_exact = dim > 128, dtype.itemsize == 4  # fp32 is multiplied without tensor cores
    is_tree &= num_queries > MIN_BLOCK  # with fewer, branches take no more registers than windows
    most_queries = MIN_BLOCK if is_exact else 32 if is_tree else 64
    block_queries = min(max(triton.next_power_of_2(num_queries), MIN_BLOCK), most_queries)
    block_keys = 32 if is_exact or is_tree else 64 if block_queries > 32 else 128
    if is_wide:
        block_keys //= 2
    if is_latent:
        block_queries, block_keys = min(block_queries, 32), MIN_BLOCK if is_exact else 32
    num_tiles = triton.cdiv(num_queries, block_queries)
    if num_tiles > 1 and not (is_latent and num_queries <= LATENT_SPLIT_QUERIES):
        return AttentionShape(block_queries, block_keys, num_tiles, 1, is_latent)
    key_tiles = triton.cdiv(num_keys, block_keys) + has_sinks
    most = MAX_LATENT_SPLITS if is_latent else MAX_SPLITS
    num_splits = min(triton.cdiv(key_tiles, SPLIT_KEYS // block_keys), most)
    return AttentionShape(block_queries, block_keys, num_tiles, num_splits, is_latent)


def attend_constants(
    shape: AttentionShape,
    keys: KvPages,
    values: KvPages,
    options: AttentionOptions,
    *,
    num_heads: int,
) -> dict[str, Any]:
    """The compile-time values of `attend_kernel`."""
    tail_dim = keys.dim - values.dim if isinstance(values, KeyPrefix) else 0
    return {
        "NUM_KV_HEADS": keys.num_heads,
        "SHARED": num_heads // keys.num_heads,
        "BLOCK_SIZE": keys.block_size,
        **block_strides(keys, values),
        "DIM": keys.dim,
        "VALUE_DIM": values.dim,
        "SCALE": options.scale,
        "SOFTCAP": options.softcap,
        "WINDOW": options.window and options.window.size,
        "IS_CHUNKED": options.window is not None and options.window.is_chunked,
        "SINK_POSITIONS": options.num_sink_positions,
        "SPLIT_TILES": SPLIT_KEYS // shape.block_keys,
        "BLOCK_QUERIES": shape.block_queries,
        "BLOCK_KEYS": shape.block_keys,
        "TAIL_DIM": tail_dim,
        "BLOCK_DIM": max(triton.next_power_of_2(keys.dim - tail_dim), MIN_BLOCK),
        "BLOCK_TAIL": max(triton.next_power_of_2(tail_dim), MIN_BLOCK),
        "BLOCK_VALUE": max(triton.next_power_of_2(values.dim), MIN_BLOCK),
        "UPCAST": INTERPRETED,
    }


def attend_options(shape: AttentionShape, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time values of `attend_kernel`."""
    if dtype.itemsize == 4:
        return {"num_warps": 8, "num_stages": 1 if shape.block_keys < 32 else 2}
    is_large = shape.block_queries > 32 and shape.block_keys < 64  # of vectors too wide for four
    is_large |= shape.is_latent and shape.block_queries > MIN_BLOCK
    return {"num_warps": 8 if is_large else 4, "num_stages": 2}


def combine_constants(num_splits: int, value_dim: int) -> dict[str, Any]:
    """The compile-time values of `combine_kernel`."""
    return {
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE": triton.next_power_of_2(value_dim),
    }


@triton.jit
def num_blocks_before(begins_ptr: tl.tensor, num_blocks: int, position: tl.tensor) -> tl.tensor:
    """The number of a sequence's blocks that begin before a position; they are in order."""
    counts = tl.full((128,), 0, dtype=tl.int32)
    for first in range(0, num_blocks, 128):
        blocks = first + tl.arange(0, 128)
        inside = blocks < num_blocks
        begins = tl.load(begins_ptr + blocks, mask=inside, other=0).to(tl.int32)
        counts += (inside & (begins < position)).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def first_visible(
    positions: tl.tensor, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr
) -> tl.tensor:
    """`AttentionWindow.first_visible`."""
    first = positions - WINDOW + 1
    if IS_CHUNKED:
        first = positions // WINDOW * WINDOW
    return first


@triton.jit
def num_set_bits(words: tl.tensor) -> tl.tensor:
    """Of uint64: the sums of pairs of bits, of fours, of eights, and of all."""
    words -= (words >> 1) & 0x5555555555555555
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def attend_kernel(
    out_ptr: tl.tensor,  # [num_tokens, num_heads, VALUE_DIM], or fp32 [rows, heads, splits, ...]
    weights_ptr: tl.tensor,  # fp32 [rows, heads, splits]: log2 of each split's sum; None: no splits
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,  # [blocks, BLOCK_SIZE, NUM_KV_HEADS, DIM], a block dense
    key_scales_ptr: tl.tensor,  # [blocks, BLOCK_SIZE, NUM_KV_HEADS]; None: keys are no codes
    values_ptr: tl.tensor,  # None: values are the elements of keys before the last TAIL_DIM
    value_scales_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    slopes_ptr: tl.tensor,  # fp32 [heads]
    rows_ptr: tl.tensor,  # int64 [sequences, num_rows], positions alike
    positions_ptr: tl.tensor,
    tables_ptr: tl.tensor,  # int64 [sequences, num_blocks], block positions alike
    block_positions_ptr: tl.tensor,
    hidden_ptr: tl.tensor,  # int64 [sequences, num_rows]
    num_rows: int,
    num_blocks: int,
    q_token_stride: int,
    q_head_stride: int,
    NUM_KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEY_SCALE_STRIDE: tl.constexpr,
    VALUE_SCALE_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SINK_POSITIONS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
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
    entries = sequence * num_rows + indices
    rows = tl.load(rows_ptr + entries, mask=inside, other=-1)
    places = tl.load(positions_ptr + entries, mask=inside, other=-1).to(tl.int32)
    positions = places
    if hidden_ptr is not None:
        hidden = tl.load(hidden_ptr + entries, mask=inside, other=0).to(tl.uint64, bitcast=True)
        positions -= num_set_bits(hidden)
    tables_ptr += sequence.to(tl.int64) * num_blocks
    last = tl.max(places)

    # The part of the block table that is read: the sinks' blocks, then keys [first, end).
    end = last + 1
    end = tl.minimum(end, num_blocks * BLOCK_SIZE) if block_positions_ptr is None else end
    first = 0
    num_sink_keys = 0
    if WINDOW is not None:
        lowest = tl.min(tl.where(positions < 0, last, positions))
        lowest = first_visible(lowest, WINDOW, IS_CHUNKED)
        if block_positions_ptr is None:
            first = tl.maximum(lowest, 0) // BLOCK_SIZE * BLOCK_SIZE
            num_sink_keys = tl.minimum(SINK_POSITIONS, first)
        else:
            begins_ptr = block_positions_ptr + sequence.to(tl.int64) * num_blocks
            first = num_blocks_before(begins_ptr, num_blocks, lowest - BLOCK_SIZE + 1) * BLOCK_SIZE
            num_sinks = tl.minimum(SINK_POSITIONS, end)
            num_sink_keys = num_blocks_before(begins_ptr, num_blocks, num_sinks) * BLOCK_SIZE
            num_sink_keys = tl.minimum(num_sink_keys, first)
    if block_positions_ptr is not None:
        begins_ptr = block_positions_ptr + sequence.to(tl.int64) * num_blocks
        end = num_blocks_before(begins_ptr, num_blocks, end) * BLOCK_SIZE
    num_sink_tiles = (num_sink_keys + BLOCK_KEYS - 1) // BLOCK_KEYS
    num_tiles = num_sink_tiles + (tl.maximum(end - first, 0) + BLOCK_KEYS - 1) // BLOCK_KEYS
    # The number of splits depends on the sequence's own keys, not on the others' or on the width of
    # the tables.
    split_tiles = (num_tiles + tl.num_programs(2) - 1) // tl.num_programs(2)
    split_tiles = tl.maximum(split_tiles, SPLIT_TILES)
    first_tile = split * split_tiles
    last_tile = tl.minimum(first_tile + split_tiles, num_tiles)

    MAIN_DIM: tl.constexpr = DIM - TAIL_DIM
    dims = tl.arange(0, BLOCK_DIM)
    value_dims = tl.arange(0, BLOCK_VALUE)
    is_query = positions >= 0
    q_rows_ptr = q_ptr + rows[:, None] * q_token_stride + (heads * q_head_stride)[:, None]
    q = tl.load(
        q_rows_ptr + dims[None, :],
        mask=is_query[:, None] & (dims < MAIN_DIM)[None, :],
        other=0.0,
    )
    dtype = q.dtype
    if UPCAST:
        q = q.to(tl.float32)
    if TAIL_DIM > 0:
        tail_dims = MAIN_DIM + tl.arange(0, BLOCK_TAIL)
        q_tail = tl.load(
            q_rows_ptr + tail_dims[None, :],
            mask=is_query[:, None] & (tail_dims < DIM)[None, :],
            other=0.0,
        ).to(q.dtype)
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
    # A weight times a scale is often below fp16's normal numbers. In fp16 `acc` therefore counts in
    # units of each row's largest product so far.
    HAS_UNITS: tl.constexpr = value_scales_ptr is not None and dtype == tl.float16
    unit = tl.full((BLOCK_QUERIES,), LEAST_UNIT, dtype=tl.float32)
    # A prompt's first tiles hold keys that all of its queries see: they need no masks. Decoding is
    # limited by reading keys, and quantized prompts would spill.
    HAS_FULL_TILES: tl.constexpr = (
        weights_ptr is None
        and key_scales_ptr is None
        and WINDOW is None
        and block_positions_ptr is None
        and hidden_ptr is None
        and slopes_ptr is None
    )
    num_full_tiles = 0
    if HAS_FULL_TILES:
        seen_by_all = tl.min(tl.where(inside, positions, last)) + 1
        num_full_tiles = tl.minimum(seen_by_all // BLOCK_KEYS, last_tile) - first_tile
        num_full_tiles = tl.maximum(num_full_tiles, 0)
    for is_masked in tl.static_range(0 if HAS_FULL_TILES else 1, 2):
        tile_before = first_tile + num_full_tiles if is_masked else first_tile
        num_steps = last_tile - tile_before if is_masked else num_full_tiles
        # Start at zero: a loop whose start depends on a loaded value is pipelined badly by Triton,
        # and spills.
        for step in range(0, num_steps):
            key_tile = tile_before + step
            start = first + (key_tile - num_sink_tiles) * BLOCK_KEYS
            limit = end
            if SINK_POSITIONS > 0:
                start = tl.where(key_tile < num_sink_tiles, key_tile * BLOCK_KEYS, start)
                limit = tl.where(key_tile < num_sink_tiles, num_sink_keys, end)
            keys = start + tl.arange(0, BLOCK_KEYS)
            blocks = keys // BLOCK_SIZE
            is_read = tl.full((BLOCK_KEYS,), True, dtype=tl.int1)
            if is_masked:
                is_key = keys < limit
                key_places = keys
                if block_positions_ptr is not None:
                    begins = tl.load(begins_ptr + blocks, mask=is_key, other=0).to(tl.int32)
                    key_places = begins + keys % BLOCK_SIZE
                visible = (key_places[None, :] <= places[:, None]) & is_key[None, :]
                key_positions = key_places[None, :]
                is_sink = (key_places < SINK_POSITIONS)[None, :]
                if hidden_ptr is not None:
                    back = places[:, None] - key_positions
                    bits = hidden[:, None] >> tl.minimum(tl.maximum(back, 0), 63).to(tl.uint64)
                    bits = tl.where(back < 64, bits, 0)
                    visible &= (bits & 1) == 0
                    if WINDOW is not None or slopes_ptr is not None:
                        key_positions -= num_set_bits(bits)
                        is_sink = key_positions < SINK_POSITIONS
                if WINDOW is not None:
                    from_position = first_visible(positions, WINDOW, IS_CHUNKED)
                    near = key_positions >= from_position[:, None]
                    visible &= near | is_sink
                if hidden_ptr is not None:
                    is_read = tl.max(visible.to(tl.int32), axis=0) > 0
                else:
                    is_read = is_key & (key_places <= last)
            page = tl.load(tables_ptr + blocks, mask=is_read, other=0).to(tl.int64)
            offsets = keys % BLOCK_SIZE * NUM_KV_HEADS + kv_head  # in their blocks
            vectors = page * KEY_STRIDE + offsets * DIM
            k = tl.load(
                keys_ptr + vectors[None, :] + dims[:, None],
                mask=is_read[None, :] & (dims < MAIN_DIM)[:, None],
                other=0.0,
            ).to(q.dtype)
            scores = tl.dot(q, k, input_precision="ieee")
            if TAIL_DIM > 0:
                k_tail = tl.load(
                    keys_ptr + vectors[None, :] + tail_dims[:, None],
                    mask=is_read[None, :] & (tail_dims < DIM)[:, None],
                    other=0.0,
                ).to(q.dtype)
                scores = tl.dot(q_tail, k_tail, scores, input_precision="ieee")
            # Exponentials are powers of two: scores in units of log 2, unless they are capped
            # first.
            scores *= SCALE if SOFTCAP is not None else SCALE * LOG2_E
            if key_scales_ptr is not None:
                scale_ptrs = key_scales_ptr + page * KEY_SCALE_STRIDE + offsets
                scales = tl.load(scale_ptrs, mask=is_read, other=0.0).to(tl.float32)
                scores *= scales[None, :]
            if SOFTCAP is not None:
                # tanh, of the absolute value: nothing overflows.
                shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / SOFTCAP))
                capped = (1.0 - shrunk) / (1.0 + shrunk) * SOFTCAP
                scores = tl.where(scores < 0, -capped, capped) * LOG2_E
            if slopes_ptr is not None:
                distances = key_positions - positions[:, None]
                scores += slopes[:, None] * distances.to(tl.float32)
            if is_masked:
                scores = tl.where(visible, scores, float("-inf"))

            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(scores - shift[:, None])
            fading = tl.exp2(largest - shift)
            total = total * fading + tl.sum(weights, axis=1)
            largest = new_largest
            if value_scales_ptr is not None:
                scale_ptrs = value_scales_ptr + page * VALUE_SCALE_STRIDE + offsets
                scales = tl.load(scale_ptrs, mask=is_read, other=0.0).to(tl.float32)
                weights *= scales[None, :]
            if HAS_UNITS:
                old_unit = unit * fading
                unit = tl.maximum(tl.maximum(old_unit, LEAST_UNIT), tl.max(weights, axis=1))
                weights *= (1.0 / unit)[:, None]
                fading = old_unit / unit
            acc *= fading[:, None]
            if values_ptr is None:
                v = tl.trans(k)
            else:
                vectors = page * VALUE_STRIDE + offsets * VALUE_DIM
                v = tl.load(
                    values_ptr + vectors[:, None] + value_dims[None, :],
                    mask=is_read[:, None] & (value_dims < VALUE_DIM)[None, :],
                    other=0.0,
                ).to(q.dtype)
            weights = weights.to(dtype)
            if UPCAST:
                weights = weights.to(tl.float32)
            acc = tl.dot(weights, v, acc, input_precision="ieee")

    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    if HAS_UNITS:
        acc *= unit[:, None]
    acc /= total[:, None]
    heads_of_all = NUM_KV_HEADS * SHARED
    if weights_ptr is None:
        out_rows = rows * heads_of_all + heads
        is_stored = inside & (rows >= 0)
    else:
        out_rows = (entries.to(tl.int64) * heads_of_all + heads) * tl.num_programs(2) + split
        is_stored = inside
        log_total = tl.where(is_empty, float("-inf"), largest + tl.log2(total))
        tl.store(weights_ptr + out_rows, log_total, mask=is_stored)
        is_stored = inside & (is_empty == 0)
    tl.store(
        out_ptr + out_rows[:, None] * VALUE_DIM + value_dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_stored[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # fp32 [rows, heads, num_splits, VALUE_DIM]
    weights_ptr: tl.tensor,  # fp32 [rows, heads, num_splits]
    rows_ptr: tl.tensor,
    num_splits: int,
    BLOCK_SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    """Combine one query's splits, weighted by their shares of the softmax sum."""
    row = tl.load(rows_ptr + tl.program_id(0))
    if row < 0:
        return
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    place = (tl.program_id(0).to(tl.int64) * num_heads + head) * num_splits
    splits = tl.arange(0, BLOCK_SPLITS)
    logs = tl.load(weights_ptr + place + splits, mask=splits < num_splits, other=float("-inf"))
    largest = tl.max(logs, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    dims = tl.arange(0, BLOCK_VALUE)
    total = tl.full((1,), 0.0, dtype=tl.float32)
    acc = tl.full((BLOCK_VALUE,), 0.0, dtype=tl.float32)
    for split in tl.static_range(BLOCK_SPLITS):
        log = tl.load(weights_ptr + place + split, mask=split < num_splits, other=float("-inf"))
        weight = tl.exp2(log - largest)
        # A split without a key was not written.
        is_read = dims < tl.where(weight == 0.0, 0, VALUE_DIM)
        partial_ptrs = partial_ptr + (place + split) * VALUE_DIM + dims
        total += weight
        acc += weight * tl.load(partial_ptrs, mask=is_read, other=0.0)
    acc /= tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + (row * num_heads + head) * VALUE_DIM + dims,
        acc.to(out_ptr.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )


INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)
"""Under TRITON_INTERPRET=1, where tl.dot of bf16 is wrong: dots are computed in fp32 then."""
