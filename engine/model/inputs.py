"""Builds the tensors of one flat forward pass from the scheduled sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...kernels.attention import AttentionBatch, PrefillChunk, SequenceGroup
from ..kv.block_pool import NULL_BLOCK
from ..kv.layout import KvGroup

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


def padding_class(size: int) -> int:
    """Sizes of one class differ by less than a factor of two.

    Chunks of one class can share a padded table; one long sequence must not pad all the others.
    """
    return (size - 1).bit_length()


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
        groups: defaultdict[Hashable, list[_Reads]] = defaultdict(list)
        prefills: list[PrefillChunk] = []
        for chunk, start in zip(chunks, starts, strict=False):
            rows = range(start, start + len(chunk.token_ids))
            blocks = visible_blocks(chunk, self.index, self.group, self.block_size)
            read = _Reads(chunk, rows, *blocks)
            if (together := self._class_of(read)) is None:
                prefills.append(self._prefill_chunk(read))
            else:
                groups[together].append(read)
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

    def _class_of(self, read: _Reads) -> Hashable:
        """Chunks of one class are computed together; None: the chunk is computed alone."""
        num_tokens = len(read.rows)
        is_long = num_tokens > MAX_GROUPED_ROWS and read.chunk.tree is None
        if self.in_place:
            # Decoding sequences, those with few tokens, and prompt chunks each share one table.
            return 0 if num_tokens == 1 else 2 if is_long else 1
        if is_long:
            return None
        return padding_class(num_tokens), padding_class(len(read.block_ids))

    def _parts(self, members: list[_Reads]) -> list[list[_Reads]]:
        """Parts that need no more memory than a large chunk."""
        if self.in_place:
            return [members]
        num_rows = max(len(read.rows) for read in members)
        num_keys = max(len(read.block_ids) for read in members) * self.block_size
        size = max(MAX_GROUP_CELLS // (num_rows * num_keys), 1)
        return [members[start : start + size] for start in range(0, len(members), size)]

    def _group(self, members: list[_Reads]) -> SequenceGroup:
        num_rows = max(len(read.rows) for read in members)
        num_blocks = max(len(read.block_ids) for read in members)
        tables = [_padded(read.block_ids, NULL_BLOCK, num_blocks) for read in members]
        # Padding begins where the sequence ends: no query sees it.
        begins = [
            _padded(read.block_positions, read.chunk.end, num_blocks)
            for read in members
            if read.block_positions is not None
        ]
        ancestors = None
        if any(read.chunk.tree is not None for read in members):
            sees = [read.chunk.ancestors(num_rows) for read in members]
            sees = [_padded(own, None, num_rows) for own in sees]
            ancestors = torch.tensor(sees).to(self.device, non_blocking=True)
        # In place, a row of -1 is no work; else a chunk's last row is computed again.
        filling = -1 if self.in_place else None
        rows = [_padded(read.rows, filling, num_rows) for read in members]
        positions = [_padded(read.chunk.positions, filling, num_rows) for read in members]
        return SequenceGroup(
            rows=_int64(rows, self.device),
            positions=_int64(positions, self.device),
            block_tables=_int64(tables, self.device),
            block_positions=_int64(begins, self.device) if begins else None,
            ancestors=ancestors,
        )

    def _prefill_chunk(self, read: _Reads) -> PrefillChunk:
        return PrefillChunk(
            start=read.rows.start,
            end=read.rows.stop,
            context_len=read.chunk.end,
            block_table=_int64(read.block_ids, self.device),
            block_positions=None
            if read.block_positions is None
            else _int64(read.block_positions, self.device),
        )


class _Reads(NamedTuple):
    """The blocks that a chunk reads."""

    chunk: SequenceChunk
    rows: range
    """Those of its tokens in the flat batch."""
    block_ids: list[int]
    block_positions: list[int] | None
    """The position of each block; None: contiguous from 0."""


def _padded(values: Sequence[T], padding: T | None, width: int) -> list[T]:
    """`padding` None: with the last of them."""
    filling = values[-1] if padding is None else padding
    return [*values, *[filling] * (width - len(values))]


def _int64(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
