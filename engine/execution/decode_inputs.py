"""The inputs of a decode step at fixed addresses, where a captured graph reads them.

The host writes a step's inputs into one buffer and copies it at once:

    token ids | positions | places | sources of pending tokens | slots of each KV group
    | rotary rows | hidden tokens | adapter rows | tiles | changed block tables ...

A token's place is its position among the cached tokens of its sequence: it is less than the
position in the sequence if tokens were evicted, and more if tokens of other branches of a draft
tree are cached before it. Rotary rows are only there for a base whose rotary embedding reads
tables, hidden tokens (`SequenceGroup.hidden`) only where draft trees are verified.

On the device, each row has a block table as wide as any step may need, which it keeps from step to
step. The copy contains only the tables that differ from their row's last one, as wide as these
need, and they are then scattered to their rows. While the same sequences decode, a row's table
changes once per block.

Rows beyond the step's are padding: a sequence of one token of the base, in the cache's spare block,
which is never read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_not, itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention import AttentionBatch, SequenceGroup
from ...kernels.lora_batch import BASE_ROW, plan_tiles
from ..config import MAX_DRAFT_TOKENS
from ..kv.block_pool import NULL_BLOCK
from ..kv.layout import KvGroup
from ..kv.sequence_blocks import NO_BLOCKS, BlockTable, block_table
from ..model.inputs import (
    DecodeChunks,
    Integers,
    PendingTokens,
    SequenceChunk,
    VisibleBlocks,
    hidden_words,
    visible_blocks,
)

NO_TILE = (0, 0, BASE_ROW)


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """The offset of each part in the copied buffer, in words of eight bytes.

    Parts with a word per row start at multiples of 16 bytes, for wide loads.
    """

    groups: tuple[KvGroup, ...]
    block_size: int
    max_rows: int
    max_model_len: int
    has_rotary_rows: bool = False
    has_trees: bool = False
    """Draft trees are verified."""

    @property
    def row_words(self) -> int:
        """The words of a part with a word per row."""
        return -(-self.max_rows // 2) * 2

    @property
    def places_start(self) -> int:
        return 2 * self.row_words

    @property
    def sources_start(self) -> int:
        """The start of `PendingTokens.sources`."""
        return 3 * self.row_words

    @property
    def slots_start(self) -> int:
        return 4 * self.row_words

    @property
    def rotary_start(self) -> int:
        """The start of `ForwardContext.rotary_rows`."""
        return self.slots_start + len(self.groups) * self.row_words

    @property
    def hidden_start(self) -> int:
        """The start of `SequenceGroup.hidden`."""
        return self.rotary_start + self.has_rotary_rows * self.row_words

    @property
    def rows_start(self) -> int:
        """The start of the adapter rows, four bytes each."""
        return self.hidden_start + self.has_trees * self.row_words

    @property
    def tiles_start(self) -> int:
        """Twelve bytes each."""
        return self.rows_start + self.row_words

    @property
    def tables_start(self) -> int:
        return self.tiles_start + 2 * self.row_words

    @property
    def num_words(self) -> int:
        num_row_numbers = len(self.groups) * self.max_rows
        return self.tables_start + num_row_numbers + self.num_table_words

    @property
    def num_table_words(self) -> int:
        """The words of the fixed tables."""
        widths = (self.table_width(group) * num_tables(group) for group in self.groups)
        return self.max_rows * sum(widths)

    def table_width(self, group: KvGroup) -> int:
        """Blocks that a query sees at most."""
        blocks = -(-self.max_model_len // self.block_size)
        if group.window is None:
            return blocks
        num_keys = group.window.size + self.has_trees * (MAX_DRAFT_TOKENS - 1)
        seen = (num_keys + self.block_size - 2) // self.block_size + 1
        return min(blocks, group.num_sink_blocks(self.block_size) + seen)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device: the copied buffer and the fixed tables."""
        return 8 * (self.num_words + self.num_table_words)


def num_tables(group: KvGroup) -> int:
    """A row's blocks; with a window also where each begins."""
    return 1 if group.window is None else 2


class DecodeInputs:
    """The inputs, filled for each step; the other methods return what a graph reads.

    Everything is int64 unless stated otherwise.
    """

    def __init__(
        self, layout: DecodeLayout, spare_blocks: Sequence[int], device: torch.device
    ) -> None:
        """`spare_blocks`: by KV group the block that padding writes to."""
        self._layout = layout
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(layout.num_words, dtype=torch.int64, pin_memory=is_cuda)
        self._device = torch.zeros(layout.num_words, dtype=torch.int64, device=device)
        self._words = self._host.numpy()
        self._copied = torch.cuda.Event() if is_cuda else None
        self._row_numbers = torch.arange(layout.max_rows, device=device)
        self._tables = [_Tables(layout, group, device) for group in layout.groups]
        spare_tables = [block_table([block]) for block in spare_blocks]
        self._padding = SequenceChunk([0], start=0, tables=spare_tables)
        self._adapter_rows: Sequence[int] = ()
        """Those in the buffer."""
        self.fill([], [], num_rows=layout.max_rows)

    def input_ids(self, num_rows: int) -> Tensor:
        """`[num_rows]`."""
        return self._device[:num_rows]

    def positions(self, num_rows: int) -> Tensor:
        """`[num_rows]`."""
        return self._rows(self._layout.row_words, num_rows)

    def rotary_rows(self, num_rows: int) -> Tensor | None:
        """`[num_rows]`: see `ForwardContext.rotary_rows`."""
        if not self._layout.has_rotary_rows:
            return None
        return self._rows(self._layout.rotary_start, num_rows)

    def row_numbers(self, num_rows: int) -> Tensor:
        """0, 1, 2, ..."""
        return self._row_numbers[:num_rows]

    def adapter_rows(self, num_rows: int) -> Tensor:
        """int32 `[num_rows]`: the table row of each one's adapter, -1 for the base."""
        return self._device[self._layout.rows_start :].view(torch.int32)[:num_rows]

    def tiles(self, num_rows: int) -> Tensor:
        """int32 `[num_rows, 3]`, see LoraTiles: as many as any adapters of the rows can need."""
        tiles = self._device[self._layout.tiles_start :].view(torch.int32)
        return tiles[: 3 * num_rows].view(-1, 3)

    def attention(self, num_rows: int) -> tuple[AttentionBatch, ...]:
        """One batch per KV group."""
        layout = self._layout
        starts = range(layout.slots_start, layout.rotary_start, layout.row_words)
        rows, places = self.row_numbers(num_rows), self._rows(layout.places_start, num_rows)
        hidden = None
        if layout.has_trees:
            hidden = self._rows(layout.hidden_start, num_rows)[:, None]
        return tuple(
            AttentionBatch(
                slot_mapping=self._rows(start, num_rows),
                groups=(tables.group(rows[:, None], places[:, None], hidden),),
                chunks=(),
            )
            for start, tables in zip(starts, self._tables, strict=True)
        )

    def fill(
        self,
        chunks: Sequence[SequenceChunk],
        adapter_rows: Sequence[int],
        *,
        num_rows: int,
        pending: PendingTokens | None = None,
    ) -> None:
        """Take the tokens of these chunks, a row each, and padding up to `num_rows`.

        `adapter_rows`: each token's table row. `pending`: the tokens that stand for others in the
        first rows.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still be reading
        decodes = DecodeChunks.of(chunks).padded(self._padding, num_rows)
        starts, num_hidden = decodes.starts, decodes.num_hidden
        places = starts - decodes.num_evicted
        num_padded = num_rows - len(adapter_rows)
        adapter_rows = [*adapter_rows, *[BASE_ROW] * num_padded]
        self._fill_rows(decodes, starts - num_hidden, places, adapter_rows)
        end, queries = self._layout.tables_start, places - num_hidden
        for index, tables in enumerate(self._tables):
            block_tables = list(map(itemgetter(index), decodes.tables))
            end = tables.fill(self._words, end, block_tables, places, queries)
            slots = self._layout.slots_start + index * self._layout.row_words
            self._words[slots : slots + num_rows] = tables.slots(places)
        start, num_pending = self._layout.sources_start, 0
        if pending is not None:
            num_pending = len(pending.sources)
            self._words[start : start + num_pending] = pending.sources
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if pending is not None:
            pending.fill(self.input_ids(num_rows), self._rows(start, num_pending))
        for tables in self._tables:
            tables.take(self._device)

    def _fill_rows(
        self,
        chunks: DecodeChunks,
        positions: Integers,
        places: Integers,
        adapter_rows: Sequence[int],
    ) -> None:
        words, layout, num_rows = self._words, self._layout, len(chunks)
        words[:num_rows] = chunks.token_ids
        words[layout.row_words :][:num_rows] = positions
        words[layout.places_start :][:num_rows] = places
        if layout.has_rotary_rows:
            words[layout.rotary_start :][:num_rows] = chunks.rotary_starts + positions
        if layout.has_trees:
            words[layout.hidden_start :][:num_rows] = hidden_words(chunks.hidden or [0])
        else:
            assert not chunks.hidden, "no draft trees were planned for"
        if adapter_rows == self._adapter_rows:
            return
        self._adapter_rows = adapter_rows
        words[layout.rows_start :].view(np.int32)[:num_rows] = adapter_rows
        tiles = plan_tiles(adapter_rows, ())
        tiles += [NO_TILE] * (num_rows - len(tiles))
        flat = list(chain.from_iterable(tiles))
        words[layout.tiles_start :].view(np.int32)[: len(flat)] = flat

    def _rows(self, start: int, num_rows: int) -> Tensor:
        return self._device[start : start + num_rows]


class _Change(NamedTuple):
    """What a step changes of a group's tables."""

    start: int
    """The word of the copied buffer from which on it is written: row numbers, then tables."""
    rows: Integers
    tables: list[BlockTable]
    """For each of these rows."""
    visible: VisibleBlocks
    """Likewise."""
    size: tuple[int, int, int]
    """Of the tables written: `[num_tables, len(rows), width]`."""


class _Tables:
    """One KV group's block tables and, with a window, the positions of their blocks."""

    def __init__(self, layout: DecodeLayout, group: KvGroup, device: torch.device) -> None:
        self._group = group
        self._block_size = layout.block_size
        self._padding = 2 * layout.max_model_len  # no query sees so far: see `endless`
        size = (num_tables(group), layout.max_rows, layout.table_width(group))
        self._blocks = torch.full(size, self._padding, dtype=torch.int64, device=device)
        self._blocks[0].fill_(NULL_BLOCK)
        # What each row holds; tables never change in place, so the same one has the same blocks.
        self._held: list[BlockTable] = [NO_BLOCKS] * layout.max_rows
        self._firsts, self._ends, self._counts = np.zeros((3, layout.max_rows), dtype=np.int64)
        self._written = np.zeros(layout.max_rows, dtype=np.int64)
        """The block that each row's token is written to: the last that it sees."""
        self._change: _Change | None = None

    def group(self, rows: Tensor, places: Tensor, hidden: Tensor | None) -> SequenceGroup:
        blocks = self._blocks[:, : len(rows)]
        return SequenceGroup(
            rows=rows,
            positions=places,
            block_tables=blocks[0],
            block_positions=blocks[1] if len(blocks) > 1 else None,
            hidden=hidden,
        )

    def fill(
        self,
        words: Integers,
        start: int,
        tables: Sequence[BlockTable],
        places: Integers,
        queries: Integers,
    ) -> int:
        """Write what changes from word `start` on; returns where it ends.

        `tables`, `places`: of the first rows, a token each. `queries`: their places without the
        hidden tokens.
        """
        if self._change is not None:  # what it changed was not taken: these rows hold nothing known
            for row in self._change.rows.tolist():
                self._held[row] = NO_BLOCKS
        seen = visible_blocks(self._group, self._block_size, queries, places + 1)
        num_rows = len(tables)
        is_changed = (seen.ends != self._ends[:num_rows]) | (seen.firsts != self._firsts[:num_rows])
        is_changed |= np.fromiter(map(is_not, tables, self._held), bool, num_rows)
        rows = np.flatnonzero(is_changed)
        tables, seen = [tables[row] for row in rows.tolist()], seen[rows]
        self._written[rows] = [
            table.item(end - 1) for table, end in zip(tables, seen.ends.tolist(), strict=True)
        ]
        width = max(seen.counts.max(initial=0), self._counts[rows].max(initial=0))
        size = (len(self._blocks), len(rows), int(width))
        self._change = _Change(start, rows, tables, seen, size)
        first_table = start + len(rows)
        end = first_table + math.prod(size)
        words[start:first_table] = rows
        written = words[first_table:end].reshape(size)
        written[0] = seen.gather(tables, size[2])
        if self._group.window is not None:
            written[1] = seen.positions(self._block_size, self._padding, size[2])
        return end

    def slots(self, places: Integers) -> Integers:
        """The slot of each row's key and value, after `fill`."""
        blocks = self._written[: len(places)]
        slots: Integers = blocks * self._block_size + places % self._block_size
        return slots

    def take(self, words: Tensor) -> None:
        """Move what `fill` has written to its rows."""
        assert self._change is not None, "filled before"
        start, rows, tables, seen, size = self._change
        if tables:
            first_table = start + len(rows)
            written = words[first_table : first_table + math.prod(size)].view(size)
            self._blocks[..., : size[2]].index_copy_(1, words[start:first_table], written)
        self._change = None
        for row, table in zip(rows.tolist(), tables, strict=True):
            self._held[row] = table
        self._firsts[rows], self._ends[rows], self._counts[rows] = (
            seen.firsts,
            seen.ends,
            seen.counts,
        )
