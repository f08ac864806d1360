"""Attention of a flat mixed batch over a paged KV cache: the reference, and the CPU implementation.

`attend_gathered`, in plain PyTorch, defines the operation and is the reference for
`attention_triton` and `attention_groups_triton`, which serve CUDA. One call serves one layer.
Sequences with few new tokens (decoding or verifying drafts) are computed many at a time, long
prompt chunks one by one. Blocks are gathered into memory that a step's layers reuse, and query
heads that share a key/value head read the same copy. Where the CPU library serves, it reads blocks
in place: for few new tokens, and in bf16 on some processors for prompts too.
Correctness does not rely on multiplying padding by zero: padded positions point at the null block,
which is all zeros, and blocks are zeroed before they get a new owner.

Layers with a window read only the blocks that a query can see: their block tables omit the blocks
that have left the window and give the position at which each block begins.

Draft tokens may form a tree, whose branches are alternative continuations. Such tokens occupy
adjacent places regardless of depth. A word per token tells which of those before it are on other
branches: it attends to none of them, and its position is lower than its place by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from . import cpu_library
from .attention_cpu import attend_group
from .attention_window import AttentionWindow
from .kv_groups import GroupedPages
from .kv_pages import GatherBuffer, KeyPrefix, KvPages

MIN_ROWS = 4
"""From this number of rows on, the sums of a row of a CPU matmul in fp32 do not depend on it: MKL
adds a row's products in different orders for one row, for two or three, and for four or more. So a
token that decodes alone and is verified with draft tokens would differ in its last bits, and a few
layers amplify the difference tenfold."""

GATHERED_BYTES_PER_THREAD = 1 << 20
"""The keys that decoding sequences gather at a time, and as much of values: what a core's caches
hold until attention has read it. 32 sequences of 1,024 tokens take 1.3 to 1.6 times as long if they
are gathered together."""

MAX_PIECE_TOKENS = 256
"""The queries of a prompt chunk that attend together. They skip the keys after the last of them,
which halves the work on a long prompt."""

WORD_BITS = 64
"""Of `SequenceGroup.hidden`: the most draft tokens of a tree."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences with similar numbers of new tokens and blocks, computed together.

    Those with fewer new tokens than `max_rows` are padded with their last one, which is computed
    repeatedly with the same result. On CUDA, where blocks are read in place, they are padded with
    rows and positions of -1: no work. A row whose position alone is -1 becomes zeros.
    """

    rows: Tensor
    """int64 `[num_sequences, max_rows]`: the positions of the new tokens in the flat batch."""
    positions: Tensor
    """int64 `[num_sequences, max_rows]`: the places of the new tokens among the cached ones of
    their sequences, in ascending order."""
    block_tables: Tensor
    """int64 `[num_sequences, max_blocks]`, padded with the null block."""
    block_positions: Tensor | None = None
    """int64 like `block_tables`: the position of each block's first token. None: the tables begin
    at position 0 and skip nothing."""
    hidden: Tensor | None = None
    """int64 `[num_sequences, max_rows]`: bit j is set if the token j places before is on another
    branch of a draft tree. None: there are no trees."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The contiguous new tokens `[start, end)` of one sequence in the flat batch."""

    start: int
    end: int
    context_len: int
    """Tokens of the sequence once the chunk is in the cache."""
    block_table: Tensor  # int64 [num_blocks]
    block_positions: Tensor | None = None
    """As in a SequenceGroup."""
    open_blocks: Tensor | None = None
    """int64: the last blocks of the table, those of the chunk's tokens, as these tokens read them.
    None: as they are in the table; see `attention_groups`."""


class GatheredKv(NamedTuple):
    """Memory that the layers of a step gather blocks to, one layer after another."""

    keys: GatherBuffer
    values: GatherBuffer


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The KV slots and block tables of a step's tokens; shared by the layers of a KV group."""

    slot_mapping: Tensor
    """int64 `[num_tokens]`: block id × block size + offset."""
    groups: tuple[SequenceGroup, ...]
    chunks: tuple[PrefillChunk, ...]
    gathered: GatheredKv = field(default_factory=lambda: GatheredKv(GatherBuffer(), GatherBuffer()))
    _joined: list[SequenceGroup] = field(default_factory=list)
    """What `chunk_group` has made, for all layers of the step."""

    def chunk_group(self) -> SequenceGroup:
        """The chunks as one group, for attention that reads blocks in place."""
        if not self._joined:
            self._joined.append(_join(self.chunks))
        return self._joined[0]


def _join(chunks: Sequence[PrefillChunk]) -> SequenceGroup:
    counts = torch.tensor([[chunk.end - chunk.start] for chunk in chunks])
    columns = torch.arange(int(counts.max())).minimum(counts - 1)
    ends = [chunk.context_len for chunk in chunks]
    begins = [chunk.block_positions for chunk in chunks if chunk.block_positions is not None]
    return SequenceGroup(
        torch.tensor([[chunk.start] for chunk in chunks]) + columns,
        torch.tensor(ends)[:, None] - counts + columns,
        pad_sequence([chunk.block_table for chunk in chunks], batch_first=True),
        # Padding begins where the longest sequence ends: no query sees it.
        pad_sequence(begins, batch_first=True, padding_value=max(ends)) if begins else None,
    )


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options that a layer's attention adds to plain softmax attention."""

    scale: float
    window: AttentionWindow | None = None
    """The positions that a query sees; None: all up to its own."""
    num_sink_positions: int = 0
    """The number of first positions that a query sees although they have left its window."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """`[num_heads]`: a logit per head that takes part in the softmax and has no value."""
    slopes: Tensor | None = None
    """fp32 `[num_heads]`, of ALiBi: a head's logits are this much smaller for each position that a
    key is before the query."""


def paged_attention(
    q: Tensor, keys: KvPages, values: KvPages, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """Attend `q [num_tokens, num_heads, dim]` to the cache; returns `[num_tokens, num_heads,
    value_dim]`.

    The step's own keys and values must have been written. Queries see themselves and the preceding
    tokens of their sequence.
    """
    out = q.new_empty(*q.shape[:2], values.dim)
    if q.is_cuda:
        assert not batch.chunks, "on CUDA a chunk is a group"
        for group in batch.groups:
            _attend_in_place(q, out, keys, values, group, options)
        return out
    name = "attend"
    if isinstance(keys, GroupedPages):
        batch, name = _readable(batch, keys), "attend_groups"
    left, attend = [], cpu_library.function(name, q.dtype)
    for group in batch.groups:
        if attend is None or not attend_group(attend, q, out, keys, values, group, options):
            left.append(group)
    chunks = batch.chunks
    if chunks and _attend_chunks_in_place(q, out, keys, values, batch, options):
        chunks = ()
    if left or chunks:
        batch = replace(batch, groups=tuple(left), chunks=chunks)
        _attend_gathered(q, out, keys, values, batch, options)
    return out


def _attend_chunks_in_place(
    q: Tensor,
    out: Tensor,
    keys: KvPages,
    values: KvPages,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> bool:
    """Write the chunks' rows of `out` by the CPU library; False, without effect, where PyTorch's
    attention serves."""
    attend = cpu_library.function("attend_prompts", q.dtype)
    if attend is None or isinstance(keys, GroupedPages):
        return False
    return attend_group(attend, q, out, keys, values, batch.chunk_group(), options)


def _attend_in_place(
    q: Tensor,
    out: Tensor,
    keys: KvPages,
    values: KvPages,
    group: SequenceGroup,
    options: AttentionOptions,
) -> None:
    """Write the group's rows of `out` on CUDA."""
    from . import attention_groups_triton, attention_triton  # Triton is not installed everywhere

    if isinstance(keys, GroupedPages) and isinstance(values, GroupedPages):
        attention_groups_triton.attend_group(q, out, keys, values, group, options)
    else:
        attention_triton.attend_group(q, out, keys, values, group, options)


def attend_gathered(
    q: Tensor, keys: KvPages, values: KvPages, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """Like `paged_attention`, in plain PyTorch on any device; without negative rows or
    positions."""
    out = q.new_empty(*q.shape[:2], values.dim)
    if isinstance(keys, GroupedPages):
        batch = _readable(batch, keys)
    _attend_gathered(q, out, keys, values, batch, options)
    return out


def _readable(batch: AttentionBatch, keys: GroupedPages) -> AttentionBatch:
    """The batch with tables that name blocks in the form in which they are read."""
    from . import attention_groups  # which imports this module

    return attention_groups.by_block(batch, keys.blocks, keys.block_size)


def _attend_gathered(
    q: Tensor,
    out: Tensor,
    keys: KvPages,
    values: KvPages,
    batch: AttentionBatch,
    options: AttentionOptions,
) -> None:
    """Write the rows of `out`. Pages of `kv_groups` take a batch of `_readable`."""
    for group in batch.groups:
        block_bytes = keys.block_size * keys.num_heads * keys.dim * q.element_size()
        for part in _parts(group, block_bytes):
            blocks = _gather(keys, values, part.block_tables, batch.gathered)
            attended = _attend_group(q[part.rows], *blocks, part, options)
            out[part.rows] = attended[..., : values.dim]
    for chunk in batch.chunks:
        rows = slice(chunk.start, chunk.end)
        blocks = _gather(keys, values, chunk.block_table, batch.gathered)
        if chunk.open_blocks is not None:
            opened = (keys.gather(chunk.open_blocks), values.gather(chunk.open_blocks))
            _attend_open_chunk(q, out, _OpenChunk(chunk, *blocks, *opened), options)
            continue
        out[rows] = _attend_chunk(q[rows], *blocks, chunk, options)[..., : values.dim]


def _gather(
    keys: KvPages, values: KvPages, block_ids: Tensor, gathered: GatheredKv
) -> tuple[Tensor, Tensor]:
    """These blocks of keys and of values, as `KvPages.gather` gives them.

    Values that are a prefix of the keys are whole keys: PyTorch's fast attention takes keys and
    values of one size only.
    """
    key_blocks = keys.gather(block_ids, gathered.keys)
    if isinstance(values, KeyPrefix):
        return key_blocks, key_blocks
    return key_blocks, values.gather(block_ids, gathered.values)


class _OpenChunk(NamedTuple):
    """A chunk whose tokens read their own blocks in another form than the blocks before."""

    chunk: PrefillChunk
    key_blocks: Tensor
    value_blocks: Tensor
    """`[num_blocks, block_size, num_kv_heads, dim]`: those of the table."""
    open_keys: Tensor
    open_values: Tensor
    """Those of `open_blocks`, the last of the table."""


def _attend_open_chunk(
    q: Tensor, out: Tensor, opened: _OpenChunk, options: AttentionOptions
) -> None:
    """Write the chunk's rows of `out`, the tokens of one block after another."""
    chunk, keys, values, open_keys, open_values = opened
    block_size, first = keys.shape[1], len(keys) - len(open_keys)
    start, context_len = chunk.start, chunk.context_len - (chunk.end - chunk.start)
    for own in range(first, len(keys)):
        end_len = min((context_len // block_size + 1) * block_size, chunk.context_len)
        end, seen = start + end_len - context_len, slice(own + 1)
        begins = None if chunk.block_positions is None else chunk.block_positions[seen]
        piece = PrefillChunk(start, end, end_len, chunk.block_table[seen], begins)
        codes = keys[own].clone(), values[own].clone()
        keys[own], values[own] = open_keys[own - first], open_values[own - first]
        out[start:end] = _attend_chunk(q[start:end], keys[seen], values[seen], piece, options)
        keys[own], values[own] = codes  # as the tokens of later blocks read it
        start, context_len = end, end_len


def _parts(group: SequenceGroup, block_bytes: int) -> Iterator[SequenceGroup]:
    """The group in parts whose keys fit into the processor's caches."""
    num_sequences, num_blocks = group.block_tables.shape
    gathered_bytes = GATHERED_BYTES_PER_THREAD * torch.get_num_threads()
    size = max(gathered_bytes // (num_blocks * block_bytes), 1)
    if size >= num_sequences:
        yield group
        return
    for start in range(0, num_sequences, size):
        part = slice(start, start + size)
        yield SequenceGroup(
            group.rows[part],
            group.positions[part],
            group.block_tables[part],
            None if group.block_positions is None else group.block_positions[part],
            None if group.hidden is None else group.hidden[part],
        )


def _attend_group(
    q: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    group: SequenceGroup,
    options: AttentionOptions,
) -> Tensor:
    """`q [num_sequences, max_rows, num_heads, dim]`, the blocks `[num_sequences, max_blocks,
    block_size, num_kv_heads, dim]`; the result like q."""
    num_sequences, num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = key_blocks.shape[2:4]
    # [B, kv_heads, context, dim]
    keys = key_blocks.flatten(1, 2).transpose(1, 2)
    values = value_blocks.flatten(1, 2).transpose(1, 2)
    # The heads that share a key/value head become its queries: nothing is repeated.
    num_shared = num_heads // num_kv_heads
    queries = q.reshape(num_sequences, num_rows, num_kv_heads, num_shared, dim)
    positions = _key_positions(group.block_positions, keys.shape[2], block_size, q.device)
    key_positions, query_positions = positions[..., None, :], group.positions[..., None]
    if group.hidden is not None:
        back, hidden = query_positions - key_positions, group.hidden[..., None]
        key_positions = key_positions - _num_hidden_before(back, hidden)
        query_positions = query_positions - _num_set_bits(hidden)
    visible = _visible(key_positions, query_positions, options)
    if group.hidden is not None:
        visible &= ~_is_hidden(back, hidden)
    if num_rows > 1:
        visible = visible.repeat(1, num_shared, 1)

    def of_queries(by_head: Tensor) -> Tensor:  # [kv_heads, shared × rows, 1]
        return by_head.view(num_kv_heads, num_shared).repeat_interleave(num_rows, 1)[..., None]

    sinks = None if options.sinks is None else of_queries(options.sinks)
    bias = None
    if options.slopes is not None:
        distances = key_positions - query_positions
        bias = of_queries(options.slopes) * distances.repeat(1, num_shared, 1)[:, None]
    out = _softmax_attention(
        queries.permute(0, 2, 3, 1, 4).flatten(2, 3),
        *(keys, values, visible[:, None], options),
        sinks=sinks,
        bias=bias,
    )  # [B, kv_heads, shared × rows, dim]
    out = out.view(num_sequences, num_kv_heads, num_shared, num_rows, -1).permute(0, 3, 1, 2, 4)
    return out.flatten(2, 3)


def _is_hidden(back: Tensor, hidden: Tensor) -> Tensor:
    """Which keys, so many places back from their queries, are on another branch; see
    `SequenceGroup.hidden`."""
    bits = hidden >> back.clamp(0, WORD_BITS - 1)
    return (bits & 1).bool() & (back < WORD_BITS)


def _num_hidden_before(back: Tensor, hidden: Tensor) -> Tensor:
    """How many tokens before each of these keys are on another branch."""
    return _num_set_bits(hidden & (-2 << back.clamp(0, WORD_BITS - 1)))


def _num_set_bits(words: Tensor) -> Tensor:
    """int64, like the words: the sums of pairs of bits, of fours, of eights, and of all."""
    words = words - (words >> 1 & 0x5555555555555555)
    words = (words & 0x3333333333333333) + (words >> 2 & 0x3333333333333333)
    words = words + (words >> 4) & 0x0F0F0F0F0F0F0F0F
    return words * 0x0101010101010101 >> 56


def _attend_chunk(
    q: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    chunk: PrefillChunk,
    options: AttentionOptions,
) -> Tensor:
    """`q [num_tokens, num_heads, dim]`, the blocks `[num_blocks, block_size, num_kv_heads, dim]`;
    the result like q."""
    num_tokens, num_heads, _ = q.shape
    block_size, num_kv_heads = key_blocks.shape[1:3]
    num_shared = num_heads // num_kv_heads
    num_unwritten = -chunk.context_len % block_size
    num_keys = key_blocks.shape[0] * block_size - num_unwritten
    positions = _key_positions(chunk.block_positions, num_keys, block_size, q.device)
    queries = torch.arange(chunk.context_len - num_tokens, chunk.context_len, device=q.device)
    # [kv_heads, heads that share it, tokens, dim]; nothing is repeated.
    q = q.unflatten(1, (num_kv_heads, num_shared)).permute(1, 2, 0, 3)
    keys, values = (
        blocks.flatten(0, 1).transpose(0, 1)[:, None].expand(-1, num_shared, -1, -1)
        for blocks in (key_blocks, value_blocks)
    )
    sinks, slopes = (
        None if by_head is None else by_head.view(num_kv_heads, num_shared, 1, 1)
        for by_head in (options.sinks, options.slopes)
    )
    out = q.new_empty(num_tokens, num_kv_heads, num_shared, values.shape[-1]).permute(1, 2, 0, 3)
    for start, end in pairwise(_piece_bounds(num_tokens)):
        seen = num_keys - (num_tokens - end)
        visible = _visible(positions[:seen], queries[start:end, None], options)
        bias = None
        if slopes is not None:
            bias = slopes * (positions[:seen] - queries[start:end, None])
        out[:, :, start:end] = _softmax_attention(
            q[:, :, start:end],
            *(keys[:, :, :seen], values[:, :, :seen], visible, options),
            sinks=sinks,
            bias=bias,
        )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _piece_bounds(num_tokens: int) -> list[int]:
    """The bounds of a chunk's pieces, which differ in length by one at most."""
    num_pieces = -(-num_tokens // MAX_PIECE_TOKENS)
    return [index * num_tokens // num_pieces for index in range(num_pieces + 1)]


def _key_positions(
    block_positions: Tensor | None, num_keys: int, block_size: int, device: torch.device
) -> Tensor:
    """The positions of the first gathered keys in their sequence."""
    if block_positions is None:
        return torch.arange(num_keys, device=device)
    offsets = torch.arange(block_size, device=device)
    return (block_positions[..., None] + offsets).flatten(-2)[..., :num_keys]


def _visible(keys: Tensor, queries: Tensor, options: AttentionOptions) -> Tensor:
    """Which key positions which query positions see; the two broadcast."""
    visible = keys <= queries
    if options.window is not None:
        near = keys >= options.window.first_visible(queries)
        visible &= near | (keys < options.num_sink_positions)
    return visible


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    options: AttentionOptions,
    *,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """`q [B, H, Q, D]`, `k, v [B, H, K, D]`; `visible` and `bias` broadcast to `[B, H, Q, K]`."""
    if options.softcap is None and sinks is None and bias is None:
        num_queries = q.shape[-2]
        if num_queries > 1 and q.dtype == torch.float32:  # of one alone it would take longer
            q = _repeat_last_row(q, MIN_ROWS)
        if visible.shape[-2] > 1:
            visible = _repeat_last_row(visible, q.shape[-2])
        out = F.scaled_dot_product_attention(q, k, v, visible, scale=options.scale)
        return out[..., :num_queries, :]
    scores = (q @ k.transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    sinks = sinks.float().expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def _repeat_last_row(x: Tensor, num_rows: int) -> Tensor:
    """x `[..., n, k]` with its last row repeated up to `num_rows` rows; x itself if it has
    enough."""
    missing = num_rows - x.shape[-2]
    if missing <= 0:
        return x
    last = x[..., -1:, :].expand(*x.shape[:-2], missing, -1)
    return torch.cat([x, last], dim=-2)
