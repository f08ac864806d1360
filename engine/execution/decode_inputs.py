"""The inputs of a decode step at fixed addresses, where a captured graph reads them.

The host writes a step's inputs into one buffer and copies it at once. In this copy, block tables
are as wide as the step needs; they are then scattered to tables that are as wide as any step may
need:

    token ids | positions | slots of each KV group | adapter rows | tiles | block tables ...

Rows beyond the step's are padding: a sequence of one token of the base, in the cache's spare block,
which is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.attention import AttentionBatch, SequenceGroup
from ...kernels.lora_batch import BASE_ROW, plan_tiles
from ..kv.block_pool import NULL_BLOCK
from ..kv.layout import KvGroup
from ..model.inputs import SequenceChunk, visible_blocks

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

    @property
    def row_words(self) -> int:
        """The words of a part with a word per row."""
        return -(-self.max_rows // 2) * 2

    @property
    def slots_start(self) -> int:
        return 2 * self.row_words

    @property
    def rows_start(self) -> int:
        """The start of the adapter rows, four bytes each."""
        return self.slots_start + len(self.groups) * self.row_words

    @property
    def tiles_start(self) -> int:
        """Twelve bytes each."""
        return self.rows_start + self.row_words

    @property
    def tables_start(self) -> int:
        return self.tiles_start + 2 * self.row_words

    @property
    def num_words(self) -> int:
        widths = (self.table_width(group) * num_tables(group) for group in self.groups)
        return self.tables_start + self.max_rows * sum(widths)

    def table_width(self, group: KvGroup) -> int:
        """Blocks that a query sees at most."""
        blocks = -(-self.max_model_len // self.block_size)
        if group.window is None:
            return blocks
        seen = (group.window + self.block_size - 2) // self.block_size + 1
        return min(blocks, group.num_sink_blocks(self.block_size) + seen)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device: the copied buffer and the fixed tables."""
        return 8 * (2 * self.num_words - self.tables_start)


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
        self._padding = SequenceChunk([0], start=0, tables=[[block] for block in spare_blocks])
        self.fill([], [], num_rows=layout.max_rows)

    def input_ids(self, num_rows: int) -> Tensor:
        """`[num_rows]`."""
        return self._device[:num_rows]

    def positions(self, num_rows: int) -> Tensor:
        """`[num_rows]`."""
        return self._rows(self._layout.row_words, num_rows)

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
        starts = range(layout.slots_start, layout.rows_start, layout.row_words)
        rows, positions = self.row_numbers(num_rows), self.positions(num_rows)
        return tuple(
            AttentionBatch(
                slot_mapping=self._rows(start, num_rows),
                groups=(tables.group(rows[:, None], positions[:, None]),),
                chunks=(),
            )
            for start, tables in zip(starts, self._tables, strict=True)
        )

    def fill(
        self, chunks: Sequence[SequenceChunk], adapter_rows: Sequence[int], *, num_rows: int
    ) -> None:
        """Take these chunks of one token each, and padding up to `num_rows`.

        `adapter_rows`: each one's table row.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still be reading
        num_padded = num_rows - len(chunks)
        chunks = [*chunks, *[self._padding] * num_padded]
        self._fill_rows(chunks, [*adapter_rows, *[BASE_ROW] * num_padded])
        end = self._layout.tables_start
        for index, tables in enumerate(self._tables):
            end = tables.fill(self._words, end, chunks, index)
            slots = self._layout.slots_start + index * self._layout.row_words
            self._words[slots : slots + num_rows] = tables.slots(chunks, index)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        for tables in self._tables:
            tables.take(self._device, num_rows)

    def _fill_rows(self, chunks: Sequence[SequenceChunk], adapter_rows: Sequence[int]) -> None:
        words, layout, num_rows = self._words, self._layout, len(chunks)
        words[:num_rows] = [chunk.token_ids[0] for chunk in chunks]
        words[layout.row_words :][:num_rows] = [chunk.start for chunk in chunks]
        words[layout.rows_start :].view(np.int32)[:num_rows] = adapter_rows
        tiles = plan_tiles(adapter_rows, ())
        tiles += [NO_TILE] * (num_rows - len(tiles))
        flat = [value for tile in tiles for value in tile]
        words[layout.tiles_start :].view(np.int32)[: len(flat)] = flat

    def _rows(self, start: int, num_rows: int) -> Tensor:
        return self._device[start : start + num_rows]


class _Tables:
    """One KV group's block tables and, with a window, the positions of their blocks."""

    def __init__(self, layout: DecodeLayout, group: KvGroup, device: torch.device) -> None:
        self._group = group
        self._block_size = layout.block_size
        width = layout.table_width(group)
        size = (num_tables(group), layout.max_rows, width)
        self._padding = (NULL_BLOCK, layout.max_model_len)  # no query sees so far
        self._places = torch.empty(size, dtype=torch.int64, device=device)
        for places, padding in zip(self._places, self._padding, strict=False):
            places.fill_(padding)
        self._used = np.zeros(layout.max_rows, dtype=np.int64)
        """For each row, the number of columns that may hold more than padding."""
        self._start = self._width = 0

    def group(self, rows: Tensor, positions: Tensor) -> SequenceGroup:
        places = self._places[:, : len(rows)]
        return SequenceGroup(
            rows=rows,
            positions=positions,
            block_tables=places[0],
            block_positions=places[1] if len(places) > 1 else None,
        )

    def fill(
        self, words: npt.NDArray[np.int64], start: int, chunks: Sequence[SequenceChunk], index: int
    ) -> int:
        """Write the tables from word `start` on; returns where they end."""
        seen = [visible_blocks(chunk, index, self._group, self._block_size) for chunk in chunks]
        used = self._used[: len(chunks)]
        last_width = used.max()
        used[:] = [len(blocks.block_ids) for blocks in seen]
        self._start, self._width = start, int(max(used.max(), last_width))
        end = start + len(self._places) * len(chunks) * self._width
        tables = words[start:end].reshape(len(self._places), len(chunks), self._width)
        for row, blocks in enumerate(seen):
            for table, values, padding in zip(tables, blocks, self._padding, strict=False):
                assert values is not None, "as many tables as there are values"
                table[row, : len(values)] = values
                table[row, len(values) :] = padding
        return end

    def slots(self, chunks: Sequence[SequenceChunk], index: int) -> list[int]:
        """The slot of each row's key and value."""
        size = self._block_size
        return [
            chunk.tables[index][chunk.start // size] * size + chunk.start % size for chunk in chunks
        ]

    def take(self, words: Tensor, num_rows: int) -> None:
        """Move the data written by `fill` to its address."""
        size = (len(self._places), num_rows, self._width)
        end = self._start + len(self._places) * num_rows * self._width
        self._places[:, :num_rows, : self._width].copy_(words[self._start : end].view(size))
