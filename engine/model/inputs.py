"""Builds the tensors of one flat forward pass from the scheduled sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...kernels.attention import AttentionBatch, PrefillChunk, SequenceGroup
from ..kv.block_pool import NULL_BLOCK
from ..kv.layout import KvGroup, padding_class

T = TypeVar("T")

MAX_GROUPED_ROWS = 16
"""Longer chunks are computed separately, because shared masks would be too large."""
MAX_GROUP_CELLS = 1 << 22
"""Queries times keys of those computed together: of each attention has a mask, and a score a head.
"""


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Adjacent tokens of one sequence that one step computes."""

    token_ids: Sequence[int]
    start: int
    """Position of the first token in its sequence."""
    tables: Sequence[Sequence[int]]
    """Per KV group the sequence's blocks, enough to hold the chunk."""
    num_logits_rows: int = 1
    """The number of last rows whose logits are kept."""
    tree: Sequence[int] | None = None
    """For each of the last `len(tree)` tokens, draft tokens, the index of the one among them that
    it follows, -1 for the token before them all; None: every token follows the one before."""
    is_prompt: bool = False
    """Its logits rows are read, and verify nothing."""

    def tokens(self) -> list[SequenceChunk]:
        """Each token as a separate chunk that sees those before it, for a chunk without a tree."""
        if len(self.token_ids) == 1:
            return [self]
        return [
            SequenceChunk([token], position, self.tables)
            for token, position in zip(self.token_ids, self.positions, strict=True)
        ]

    @property
    def end(self) -> int:
        """The end of the blocks' positions that it writes."""
        return self.start + len(self.token_ids)

    @property
    def is_grouped(self) -> bool:
        """Whether it is computed together with others of few tokens."""
        return self.tree is not None or len(self.token_ids) <= MAX_GROUPED_ROWS

    @property
    def positions(self) -> Sequence[int]:
        """The position of each token in its sequence."""
        if self.tree is None:
            return range(self.start, self.end)
        positions: list[int] = []
        for parent in self._parents:
            positions.append(self.start if parent < 0 else positions[parent] + 1)
        return positions

    def ancestors(self, width: int) -> list[list[bool]]:
        """For each token which ones of the chunk it follows, itself included, padded to a width."""
        rows: list[list[bool]] = []
        for index, parent in enumerate(self._parents):
            row = [False] * width if parent < 0 else rows[parent].copy()
            row[index] = True
            rows.append(row)
        return rows

    @property
    def _parents(self) -> list[int]:
        """For each token the index of the one that it follows, -1 for the first."""
        tree = self.tree or ()
        num_known = len(self.token_ids) - len(tree)
        return [*range(-1, num_known - 1), *(num_known + parent for parent in tree)]


class VisibleBlocks(NamedTuple):
    """The blocks that any query of a chunk sees."""

    block_ids: list[int]
    positions: list[int] | None
    """The position of each block; None: contiguous from 0."""


def visible_blocks(
    chunk: SequenceChunk, index: int, group: KvGroup, block_size: int
) -> VisibleBlocks:
    """The visible blocks for the KV group with this index."""
    table, end = chunk.tables[index], -(-chunk.end // block_size)
    if group.window is None:
        return VisibleBlocks(list(table[:end]), None)
    first = group.first_visible_block(chunk.start, block_size)
    sinks = min(first, group.num_sink_blocks(block_size))
    seen = [*range(sinks), *range(first, end)]
    return VisibleBlocks([table[block] for block in seen], [block * block_size for block in seen])


@dataclass(frozen=True, slots=True)
class StepInputs:
    input_ids: Tensor
    """int64 `[num_tokens]`."""
    positions: Tensor
    """int64 `[num_tokens]`."""
    attention: tuple[AttentionBatch, ...]
    """One batch per KV group."""
    logits_rows: tuple[int, ...]
    """Rows whose logits are kept, those of each chunk adjacent."""


def make_inputs(
    chunks: Sequence[SequenceChunk],
    *,
    groups: Sequence[KvGroup],
    block_size: int,
    device: torch.device,
    in_place: bool | None = None,
) -> StepInputs:
    """Lay out chunks one after another; attention groups those of similar size.

    in_place: whether attention reads blocks in place, so that padding costs nothing; None: by the
    device.
    """
    starts = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
    if in_place is None:
        in_place = device.type == "cuda"
    layouts = [
        _Layout(index, group, block_size, device, in_place) for index, group in enumerate(groups)
    ]
    return StepInputs(
        input_ids=_int64([token for chunk in chunks for token in chunk.token_ids], device),
        positions=_int64([position for chunk in chunks for position in chunk.positions], device),
        attention=tuple(layout.batch(chunks, starts) for layout in layouts),
        logits_rows=tuple(logits_rows(chunks)),
    )


def logits_rows(chunks: Sequence[SequenceChunk]) -> list[int]:
    """The rows whose logits are kept, for consecutive chunks."""
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    return [
        row
        for chunk, end in zip(chunks, ends, strict=True)
        for row in range(end - chunk.num_logits_rows, end)
    ]


@dataclass(frozen=True, slots=True)
class _Layout:
    """One KV group's view of the step."""

    index: int
    group: KvGroup
    block_size: int
    device: torch.device
    in_place: bool

    def batch(self, chunks: Sequence[SequenceChunk], starts: Sequence[int]) -> AttentionBatch:
        """`starts`: the row of each chunk's first token."""
        groups: defaultdict[tuple[int, int], list[_Reads]] = defaultdict(list)
        prefills: list[PrefillChunk] = []
        for read in map(self._reads, chunks, starts):
            if self.in_place:
                groups[read.row_class].append(read)
            elif read.chunk.is_grouped:
                groups[read.size_class].append(read)
            else:
                prefills.append(self._prefill_chunk(read))
        return AttentionBatch(
            slot_mapping=_int64(self._slots(chunks), self.device),
            groups=tuple(
                self._group(part) for members in groups.values() for part in self._parts(members)
            ),
            chunks=tuple(prefills),
        )

    def _slots(self, chunks: Sequence[SequenceChunk]) -> list[int]:
        size = self.block_size
        slots = [
            table[position // size] * size + position % size
            for chunk in chunks
            for table in (chunk.tables[self.index],)
            for position in range(chunk.start, chunk.end)
        ]
        assert min(slots) >= size, "the null block is never written"
        return slots

    def _reads(self, chunk: SequenceChunk, row: int) -> _Reads:
        blocks = visible_blocks(chunk, self.index, self.group, self.block_size)
        return _Reads(chunk, row, *blocks)

    def _parts(self, members: list[_Reads]) -> list[list[_Reads]]:
        """Parts that need no more memory than a large chunk."""
        if self.in_place:
            return [members]
        num_rows = max(len(read.chunk.token_ids) for read in members)
        num_keys = max(len(read.block_ids) for read in members) * self.block_size
        size = max(MAX_GROUP_CELLS // (num_rows * num_keys), 1)
        return [members[start : start + size] for start in range(0, len(members), size)]

    def _group(self, members: list[_Reads]) -> SequenceGroup:
        num_rows = max(len(read.chunk.token_ids) for read in members)
        num_blocks = max(len(read.block_ids) for read in members)
        tables = [_padded(read.block_ids, NULL_BLOCK, num_blocks) for read in members]
        # Padding begins where the sequence ends: no query sees it.
        begins = [
            _padded(read.positions, read.chunk.end, num_blocks)
            for read in members
            if read.positions is not None
        ]
        ancestors = None
        if any(read.chunk.tree is not None for read in members):
            sees = [_extended(read.chunk.ancestors(num_rows), num_rows) for read in members]
            ancestors = torch.tensor(sees).to(self.device, non_blocking=True)
        rows = [self._padded_rows(read.rows, num_rows) for read in members]
        positions = [self._padded_rows(read.chunk.positions, num_rows) for read in members]
        return SequenceGroup(
            rows=_int64(rows, self.device),
            positions=_int64(positions, self.device),
            block_tables=_int64(tables, self.device),
            block_positions=_int64(begins, self.device) if begins else None,
            ancestors=ancestors,
        )

    def _padded_rows(self, values: Sequence[int], width: int) -> list[int]:
        return _padded(values, -1, width) if self.in_place else _extended(values, width)

    def _prefill_chunk(self, read: _Reads) -> PrefillChunk:
        return PrefillChunk(
            start=read.row,
            end=read.rows.stop,
            context_len=read.chunk.end,
            block_table=_int64(read.block_ids, self.device),
            block_positions=None if read.positions is None else _int64(read.positions, self.device),
        )


class _Reads(NamedTuple):
    """The blocks that a chunk reads."""

    chunk: SequenceChunk
    row: int
    """The row of its first token in the flat batch."""
    block_ids: list[int]
    positions: list[int] | None
    """The position of each block; None: contiguous from 0."""

    @property
    def rows(self) -> range:
        return range(self.row, self.row + len(self.chunk.token_ids))

    @property
    def row_class(self) -> tuple[int, int]:
        """Decoding sequences, those with few tokens, and prompt chunks each share one table."""
        return (0 if len(self.chunk.token_ids) == 1 else 1 if self.chunk.is_grouped else 2), 0

    @property
    def size_class(self) -> tuple[int, int]:
        """Members of one class pad each other by less than their own size."""
        return padding_class(len(self.chunk.token_ids)), padding_class(len(self.block_ids))


def _padded(values: Sequence[T], padding: T, width: int) -> list[T]:
    return [*values, *[padding] * (width - len(values))]


def _extended(values: Sequence[T], width: int) -> list[T]:
    """Padded with the last of them."""
    return _padded(values, values[-1], width)


def _int64(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
