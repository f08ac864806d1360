"""Attention over pages of `kv_groups`: each query reads its own block open, those before it as
codes.

The batch is rewritten once for all layers: its sequences are cut where their new tokens enter
another block, and block tables name the open form of the last block. Attention itself is the same
as over other pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .attention import AttentionBatch, PrefillChunk, SequenceGroup
from .kv_groups import OpenBlocks

NULL_BLOCK = 0


def by_block(batch: AttentionBatch, blocks: OpenBlocks, block_size: int) -> AttentionBatch:
    """The batch with open blocks in its tables and chunks; without draft trees."""
    if blocks.last_batch is not None and blocks.last_batch[0] is batch:
        return blocks.last_batch[1]
    written = batch.slot_mapping // block_size
    served = replace(
        batch,
        groups=tuple(
            part
            for group in batch.groups
            for part in _cut_group(group, written, blocks, block_size)
        ),
        chunks=tuple(_open_chunk(chunk, written, blocks, block_size) for chunk in batch.chunks),
    )
    blocks.last_batch = batch, served
    return served


def _cut_group(
    group: SequenceGroup, written: Tensor, blocks: OpenBlocks, block_size: int
) -> Iterator[SequenceGroup]:
    """The group in parts, in each of which the rows of a sequence lie in one block.

    `written [num_tokens]`: the block that each new token of the step is written to.
    """
    assert group.hidden is None, "a tree's tokens are not in the order of their positions"
    blocks_of_rows = group.positions // block_size
    nth = blocks_of_rows - blocks_of_rows[:, :1]
    for step in range(int(nth.max()) + 1):
        is_here = nth == step
        members = is_here.any(1).nonzero()[:, 0]
        counts = is_here[members].sum(1, keepdim=True)
        columns = torch.arange(int(counts.max()), device=counts.device)
        # The last row is computed again where a sequence has fewer.
        columns = is_here[members].int().argmax(1, keepdim=True) + columns.minimum(counts - 1)
        rows = group.rows[members].gather(1, columns)
        positions = group.positions[members].gather(1, columns)
        begins = None if group.block_positions is None else group.block_positions[members]
        own = _own_entries(positions[:, :1] // block_size, begins, block_size)
        tables, entries = group.block_tables[members], torch.arange(group.block_tables.shape[1])
        tables = tables.masked_fill(entries.to(own.device) > own, NULL_BLOCK)
        tables.scatter_(1, own, blocks.readable(written[rows[:, :1]]))
        yield SequenceGroup(rows, positions, tables, begins)


def _own_entries(own_blocks: Tensor, begins: Tensor | None, block_size: int) -> Tensor:
    """`[num_sequences, 1]`: the index in its table of each sequence's own block."""
    if begins is None:
        return own_blocks
    return (begins == own_blocks * block_size).int().argmax(1, keepdim=True)


def _open_chunk(
    chunk: PrefillChunk, written: Tensor, blocks: OpenBlocks, block_size: int
) -> PrefillChunk:
    first = chunk.context_len - (chunk.end - chunk.start)
    begins = [max(block * block_size, first) for block in own_blocks_of(chunk, block_size)]
    rows = torch.tensor(begins, device=written.device) - first + chunk.start
    return replace(chunk, open_blocks=blocks.readable(written[rows]))


def own_blocks_of(chunk: PrefillChunk, block_size: int) -> range:
    """The blocks, by position, that the chunk's tokens are in."""
    first = chunk.context_len - (chunk.end - chunk.start)
    return range(first // block_size, (chunk.context_len - 1) // block_size + 1)
