"""Builds the tensors of one flat forward pass from the scheduled sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, zip_longest
from operator import is_not, itemgetter
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.attention import AttentionBatch, PrefillChunk, SequenceGroup
from ..kv.block_pool import NULL_BLOCK
from ..kv.layout import KvGroup
from ..kv.sequence_blocks import BlockTable
from ..transfers import to_device
from .state_batch import StateBatch, make_state_batch

Integers = npt.NDArray[np.int64]

_ALONE = -1
"""The class of chunks that are computed alone."""
MAX_GROUPED_ROWS = 16
"""Longer chunks are computed separately, because shared masks would be too large."""
MAX_GROUP_CELLS = 1 << 22
"""Queries times keys of those computed together: of each attention has a mask, and a score a head.
"""


class SequenceChunk(NamedTuple):
    """Adjacent tokens of one sequence that one step computes."""

    token_ids: Sequence[int]
    start: int
    """Position of the first token in its sequence."""
    tables: Sequence[BlockTable]
    """Per KV group the sequence's blocks, enough to hold the chunk."""
    num_logits_rows: int = 1
    """The number of last rows whose logits are kept."""
    tree: Sequence[int] | None = None
    """For each of the last `len(tree)` tokens up to the chunk's end, draft tokens, the index of the
    one among them that it follows, -1 for the token before them all. There may be more of them than
    tokens in the chunk: the first ones are cached. None: every token follows the one before."""
    is_prompt: bool = False
    """Its logits rows are read, and verify nothing."""
    num_evicted: int = 0
    """Tokens before it that have no place in the blocks any more: a token's place is its position
    less these."""
    rotary_start: int = 0
    """Where its sequence begins in the tables of rotary embeddings: `RotaryContexts.start`."""
    num_base_tokens: int = 0
    """Its first tokens, fewer than all, on which the sequence's adapter does not act."""

    @property
    def place(self) -> int:
        """That of its first token; the others follow, whatever their tree."""
        return self.start - self.num_evicted

    @property
    def end(self) -> int:
        """The end of the blocks' places that it writes."""
        return self.place + len(self.token_ids)

    @property
    def hidden(self) -> list[int]:
        """For each token a word whose bit j is set if the token j places before is on another
        branch of the tree: `SequenceGroup.hidden` without a sign."""
        words: list[int] = []
        for index, parent in enumerate(self.tree or ()):
            distance = index - parent
            of_parent = words[parent] if parent >= 0 else 0
            # All between a token and its parent are on other branches.
            words.append(of_parent << distance | (1 << distance) - 2)
        num_others = len(self.token_ids) - len(words)
        return [0] * num_others + words[max(-num_others, 0) :]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeChunks(Sequence[SequenceChunk]):
    """Chunks of one token each, by column: a decode step has hundreds of them."""

    token_ids: Integers
    starts: Integers
    """In a draft tree, each token counts all before it, whatever their branches."""
    tables: Sequence[Sequence[BlockTable]]
    num_evicted: Integers
    rotary_starts: Integers
    hidden: Sequence[int] = ()
    """See `SequenceChunk.hidden`; empty without draft trees."""

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk]) -> DecodeChunks:
        """Each token of these chunks as a separate one."""
        if isinstance(chunks, DecodeChunks):
            return chunks
        each = [chunk for chunk in chunks for _ in chunk.token_ids]
        has_trees = any(chunk.tree is not None for chunk in chunks)
        return cls(
            integers([token for chunk in chunks for token in chunk.token_ids]),
            integers([chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))]),
            [chunk.tables for chunk in each],
            integers([chunk.num_evicted for chunk in each]),
            integers([chunk.rotary_start for chunk in each]),
            list(chain.from_iterable(chunk.hidden for chunk in chunks)) if has_trees else (),
        )

    @property
    def num_hidden(self) -> Integers:
        """For each the number of tokens on other branches before it."""
        return num_hidden(self.hidden) if self.hidden else np.zeros(len(self), dtype=np.int64)

    def padded(self, chunk: SequenceChunk, num_chunks: int) -> DecodeChunks:
        """With this chunk of one token after them, as often as there are to be so many."""
        count = num_chunks - len(self)
        if count <= 0:
            return self
        return DecodeChunks(
            _followed(self.token_ids, chunk.token_ids[0], count),
            _followed(self.starts, chunk.start, count),
            [*self.tables, *[chunk.tables] * count],
            _followed(self.num_evicted, chunk.num_evicted, count),
            _followed(self.rotary_starts, chunk.rotary_start, count),
            [*self.hidden, *[0] * count] if self.hidden else (),
        )

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> SequenceChunk: ...

    @overload
    def __getitem__(self, index: slice) -> list[SequenceChunk]: ...

    def __getitem__(self, index: int | slice) -> SequenceChunk | list[SequenceChunk]:
        assert not self.hidden, "a token of a tree is no chunk"
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return SequenceChunk(
            [self.token_ids.item(index)],
            self.starts.item(index),
            self.tables[index],
            num_evicted=self.num_evicted.item(index),
            rotary_start=self.rotary_starts.item(index),
        )


def integers(values: Sequence[int]) -> Integers:
    """int64 `[len(values)]`."""
    return np.fromiter(values, np.int64, len(values))


def _followed(values: Integers, value: int, count: int) -> Integers:
    """These values, and after them so many times this one."""
    return np.append(values, [value] * count)


def num_hidden(words: Sequence[int]) -> Integers:
    """The set bits of each word: so many tokens before it are on other branches."""
    return np.array([word.bit_count() for word in words], dtype=np.int64)


def hidden_words(words: Sequence[int]) -> Integers:
    """These words as `SequenceGroup.hidden` has them."""
    return np.array(words, dtype=np.uint64).view(np.int64)


def num_tokens_of(chunks: Sequence[SequenceChunk]) -> int:
    """Of all chunks."""
    if isinstance(chunks, DecodeChunks):
        return len(chunks)
    return sum(len(chunk.token_ids) for chunk in chunks)


class PendingTokens(Protocol):
    """Tokens of a step that the step before it sampled and the host has not read."""

    @property
    def sources(self) -> list[int]:
        """For each of the step's first rows the index of its token among the sampled ones; -1: the
        host knows it."""
        ...

    def fill(self, input_ids: Tensor, sources: Tensor) -> None:
        """Put them into the step's `input_ids [num_rows]`; `sources`: on the device."""
        ...


class SampledTokens(NamedTuple):
    """Pending tokens that this process has sampled."""

    sampled: Tensor
    """int64, on the device."""
    sources: list[int]

    def fill(self, input_ids: Tensor, sources: Tensor) -> None:
        """See `PendingTokens.fill`."""
        known = input_ids[: len(sources)]
        pending = self.sampled.index_select(0, sources.clamp(min=0))
        known.copy_(torch.where(sources < 0, known, pending))


def padding_class(sizes: npt.ArrayLike) -> Integers:
    """Sizes of one class differ by less than a factor of two.

    Chunks of one class can share a padded table; one long sequence must not pad all the others.
    """
    _, exponents = np.frexp(np.subtract(sizes, 1))
    classes: Integers = exponents.astype(np.int64)
    return classes


@dataclass(frozen=True, slots=True)
class VisibleBlocks:
    """For each of some chunks the indices in its block table that any of its queries sees: those of
    `num_sinks` first blocks, and `[firsts, ends)`."""

    num_sinks: Integers
    firsts: Integers
    ends: Integers

    @property
    def counts(self) -> Integers:
        return self.num_sinks + self.ends - self.firsts

    def __getitem__(self, index: Integers | slice) -> VisibleBlocks:
        return VisibleBlocks(self.num_sinks[index], self.firsts[index], self.ends[index])

    def gather(self, tables: Sequence[BlockTable], width: int) -> Integers:
        """The visible blocks of these tables, in rows padded to a width."""
        # Zeros are null blocks, and take no time until a row is written.
        rows = np.zeros((len(tables), width), dtype=np.int64)
        spans = zip(
            rows,
            tables,
            self.num_sinks.tolist(),
            self.firsts.tolist(),
            self.ends.tolist(),
            strict=True,
        )
        for row, table, num_sinks, first, end in spans:
            row[num_sinks : num_sinks + end - first] = table[first:end]
            if num_sinks:
                row[:num_sinks] = table[:num_sinks]
        return rows

    def positions(self, block_size: int, padding: Integers | int, width: int) -> Integers:
        """The position of each visible block's first token, in rows padded to a width.

        `padding`: the position of what is no block, for all chunks or each.
        """
        columns, num_sinks = np.arange(width), self.num_sinks[:, None]
        blocks = np.where(columns < num_sinks, columns, columns - num_sinks + self.firsts[:, None])
        is_block = columns < self.counts[:, None]
        return np.where(is_block, blocks * block_size, np.reshape(padding, (-1, 1)))


def visible_blocks(
    group: KvGroup, block_size: int, starts: Integers, ends: Integers
) -> VisibleBlocks:
    """The visible blocks of chunks of the positions `[starts, ends)`."""
    end_blocks = -(-ends // block_size)
    if group.window is None:
        nothing = np.zeros_like(starts)
        return VisibleBlocks(nothing, nothing, end_blocks)
    firsts = np.maximum(group.window.first_visible(starts), 0) // block_size
    num_sinks = np.minimum(firsts, group.num_sink_blocks(block_size))
    return VisibleBlocks(num_sinks, firsts, end_blocks)


class StepTables(Protocol):
    """The block tables of a step's chunks in one KV group."""

    def written(self, firsts: Integers, ends: Integers) -> Integers:
        """The blocks with the indices `[first, end)` of each table, one after another."""
        ...

    def gather(self, members: Integers, visible: VisibleBlocks, width: int) -> Integers:
        """The visible blocks of these chunks, which `visible` is of, in rows padded to a width."""
        ...


class SeparateTables(NamedTuple):
    """Any tables, each read for itself."""

    tables: Sequence[BlockTable]

    def written(self, firsts: Integers, ends: Integers) -> Integers:
        """See `StepTables.written`."""
        written: list[int] = []
        for table, first, end in zip(self.tables, firsts.tolist(), ends.tolist(), strict=True):
            if end - first == 1:
                written.append(table.item(first))
            else:
                written += table[first:end].tolist()
        return np.array(written)

    def gather(self, members: Integers, visible: VisibleBlocks, width: int) -> Integers:
        """See `StepTables.gather`."""
        return visible.gather([self.tables[index] for index in members], width)


class _Gathered(NamedTuple):
    """Visible blocks of some chunks of a step."""

    blocks: Integers
    """`[num_chunks, width]`."""
    rows: Integers
    """The row that each is copied from; -1: it has no whole one."""


class KeptTables(NamedTuple):
    """Tables of decoding sequences in a group without a window, as rows of one array."""

    blocks: Integers
    """`[num_rows, width]`, padded with null blocks."""
    lengths: Integers
    """Of each row without padding."""
    rows: Integers
    """Of each chunk."""
    before: Mapping[bytes, _Gathered]
    """What the last step gathered, by the chunks; written to."""
    gathered: dict[bytes, _Gathered]
    """What this one gathers."""

    def written(self, firsts: Integers, _ends: Integers) -> Integers:
        """See `StepTables.written`: each chunk writes to one block."""
        written: Integers = self.blocks[self.rows, firsts]
        return written

    def gather(self, members: Integers, visible: VisibleBlocks, width: int) -> Integers:
        """See `StepTables.gather`. Valid until the next step's."""
        rows, ends, key = self.rows[members], visible.ends, members.tobytes()
        found = self.before.get(key)
        if found is not None and found.blocks.shape[1] == width:
            blocks, changed = found.blocks, np.flatnonzero(found.rows != rows)
            blocks[changed] = self.blocks[rows[changed], :width]
        else:
            blocks = self.blocks[rows, :width]
        for index in np.flatnonzero(self.lengths[rows] > ends).tolist():
            blocks[index, ends[index] :] = NULL_BLOCK
            rows[index] = -1
        self.gathered[key] = _Gathered(blocks, rows)
        return blocks


class TableRows:
    """Keeps the block tables of decoding sequences from step to step.

    A table never changes in place, so its row is written once and kept while its sequence decodes:
    a step writes the tables that have a new block, in whatever order the sequences come.
    """

    def __init__(self) -> None:
        self._blocks: Integers = np.zeros((0, 0), dtype=np.int64)
        self._lengths: Integers = np.zeros(0, dtype=np.int64)
        self._tables: list[BlockTable] = []
        """Of the first rows. While a table is held, no other one has its identity."""
        self._row_of: dict[int, int] = {}
        """By the identity of the table."""
        self._found: Sequence[BlockTable] = ()
        """Those of the last call."""
        self._rows: Integers = np.zeros(0, dtype=np.int64)
        """Of these."""
        self._gathered: dict[bytes, _Gathered] = {}
        """In the step of the last call."""

    def find(self, tables: Sequence[BlockTable]) -> KeptTables:
        """These tables; valid until the next call."""
        rows = self._rows
        if len(tables) != len(rows):
            rows, changed = np.zeros(len(tables), np.int64), list(range(len(tables)))
        else:
            rows = rows.copy()
            changed = list(compress(range(len(rows)), map(is_not, tables, self._found)))
        missing = [index for index in changed if id(tables[index]) not in self._row_of]
        if missing and not self._has_room(missing, tables):
            self._start_again(tables)
            changed = list(range(len(tables)))
        if changed:
            rows[changed] = [self._add(tables[index]) for index in changed]
        self._found, self._rows = tables, rows
        before, self._gathered = self._gathered, {}
        return KeptTables(self._blocks, self._lengths, rows, before, self._gathered)

    def _has_room(self, missing: Sequence[int], tables: Sequence[BlockTable]) -> bool:
        """Whether the missing ones of these tables fit."""
        num_rows, width = self._blocks.shape
        is_wide = all(len(tables[index]) <= width for index in missing)
        return is_wide and len(self._tables) + len(missing) <= num_rows

    def _start_again(self, tables: Sequence[BlockTable]) -> None:
        """Forget all rows; have room for these tables and for more that replace them."""
        longest = max(map(len, tables))
        size = (4 * len(tables), longest + longest // 8 + 1)
        self._blocks, self._lengths = np.zeros(size, np.int64), np.zeros(size[0], np.int64)
        self._tables, self._row_of = [], {}
        self._gathered = {}

    def _add(self, table: BlockTable) -> int:
        """The row of the table, written unless it is there."""
        row = self._row_of.setdefault(id(table), len(self._tables))
        if row == len(self._tables):
            self._blocks[row, : len(table)], self._lengths[row] = table, len(table)
            self._tables.append(table)
        return row


@dataclass(frozen=True, slots=True)
class StepInputs:
    input_ids: Tensor
    """int64 `[num_tokens]`."""
    positions: Tensor
    """int64 `[num_tokens]`."""
    attention: tuple[AttentionBatch, ...]
    """One batch per KV group of layers that attend."""
    states: StateBatch | None
    """Of the group of states; None: there is none."""
    logits_rows: Tensor
    """int64: rows whose logits are kept, those of each chunk adjacent."""
    rotary_rows: Tensor | None
    """See `ForwardContext.rotary_rows`."""


def make_inputs(
    chunks: Sequence[SequenceChunk],
    *,
    groups: Sequence[KvGroup],
    block_size: int,
    device: torch.device,
    in_place: bool | None = None,
    table_rows: Sequence[TableRows] = (),
) -> StepInputs:
    """Lay out chunks one after another; attention groups those of similar size.

    in_place: whether attention reads blocks in place, so that padding costs nothing; None: by the
    device. table_rows: of each KV group, kept from the step before; none: all tables are read.
    """
    if in_place is None:
        in_place = device.type == "cuda"
    if isinstance(chunks, DecodeChunks):
        rows = _lay_out_decodes(chunks, block_size)
    else:
        rows = _lay_out(chunks, block_size)
    layouts = [
        _Layout(index, group, block_size, device, in_place, chunks, rows, kept)
        for index, (group, kept) in enumerate(zip_longest(groups, table_rows))
        if not group.holds_states
    ]
    states = None
    if groups[-1].holds_states:
        each = list(chunks)  # made once
        states = make_state_batch(
            [chunk.tables[-1] for chunk in each],
            [chunk.place for chunk in each],
            [len(chunk.token_ids) for chunk in each],
            block_size=block_size,
            device=device,
        )
    return StepInputs(
        input_ids=to_device(rows.token_ids, device),
        positions=to_device(rows.positions, device),
        attention=tuple(layout.batch() for layout in layouts),
        states=states,
        logits_rows=to_device(rows.kept, device),
        rotary_rows=None if rows.rotary is None else to_device(rows.rotary, device),
    )


def logits_rows(chunks: Sequence[SequenceChunk]) -> Integers:
    """The rows whose logits are kept, for consecutive chunks."""
    counts = np.array([len(chunk.token_ids) for chunk in chunks])
    return _kept_rows(counts, np.array([chunk.num_logits_rows for chunk in chunks]))


def _kept_rows(counts: Integers, num_kept: Integers) -> Integers:
    """The last `num_kept` rows of each chunk, of so many tokens each."""
    return _ranges(np.cumsum(counts) - num_kept, num_kept)


class _Rows(NamedTuple):
    """The rows of a step: its tokens, chunk by chunk."""

    token_ids: Integers
    """For each row."""
    starts: Integers
    """For each chunk the place of its first token in its sequence's blocks."""
    counts: Integers
    """For each chunk the number of its tokens."""
    queries: Integers
    """For each chunk the least place of its tokens, each without the hidden tokens before it."""
    is_tree: npt.NDArray[np.bool_]
    """For each chunk."""
    begins: Integers
    """For each chunk its first row."""
    first_written: Integers
    """For each chunk the first index in its block table that it writes to."""
    end_written: Integers
    """For each chunk the end of these indices."""
    blocks: Integers
    """For each row the index of the block that it writes to, among those of all chunks."""
    offsets: Integers
    """For each row its place in this block."""
    positions: Integers
    """For each row that in its sequence."""
    places: Integers
    """For each row its place among the cached tokens of its sequence."""
    hidden: Integers | None
    """For each row the word of `SequenceGroup.hidden`; None: there are no trees."""
    rotary: Integers | None
    """For each row its position after the start of its sequence in the tables of rotary embeddings;
    None: all start at 0."""
    kept: Integers
    """The rows whose logits are kept."""


def _lay_out(chunks: Sequence[SequenceChunk], block_size: int) -> _Rows:
    # One pass over the chunks: a step has a few columns and hundreds of chunks.
    token_ids, all_starts, _, kept, trees, _, evicted, rotary, _ = zip(*chunks, strict=True)
    num_evicted, rotary_starts = np.array(evicted), np.array(rotary)
    starts = np.array(all_starts) - num_evicted
    counts = np.array(list(map(len, token_ids)))
    is_tree = np.array([tree is not None for tree in trees])
    begins = np.cumsum(counts) - counts
    places = positions = _ranges(starts, counts)
    if num_evicted.any():
        positions = places + np.repeat(num_evicted, counts)
    queries, hidden = starts, None
    if is_tree.any():
        words = list(chain.from_iterable(chunk.hidden for chunk in chunks))
        num_skipped = num_hidden(words)
        queries = np.minimum.reduceat(places - num_skipped, begins)
        positions, hidden = positions - num_skipped, hidden_words(words)
    firsts, ends = starts // block_size, -(-(starts + counts) // block_size)
    before = np.cumsum(ends - firsts) - ends
    return _Rows(
        np.array(list(chain.from_iterable(token_ids)), dtype=np.int64),
        starts,
        counts,
        queries,
        is_tree,
        begins,
        firsts,
        ends,
        blocks=places // block_size + np.repeat(before, counts),
        offsets=places % block_size,
        positions=positions,
        places=places,
        hidden=hidden,
        rotary=positions + np.repeat(rotary_starts, counts) if rotary_starts.any() else None,
        kept=_kept_rows(counts, np.array(kept)),
    )


def _lay_out_decodes(chunks: DecodeChunks, block_size: int) -> _Rows:
    """A row is a chunk."""
    positions = chunks.starts
    rows, ones = np.arange(len(positions)), np.ones_like(positions)
    places = positions - chunks.num_evicted
    firsts, offsets = np.divmod(places, block_size)
    rotary = None
    if chunks.rotary_starts.any():
        rotary = positions + chunks.rotary_starts
    return _Rows(
        chunks.token_ids,
        places,
        ones,
        places,
        np.zeros_like(positions, dtype=np.bool_),
        begins=rows,
        first_written=firsts,
        end_written=firsts + 1,
        blocks=rows,
        offsets=offsets,
        positions=positions,
        places=places,
        hidden=None,
        rotary=rotary,
        kept=rows,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """One KV group's view of the step."""

    index: int
    group: KvGroup
    block_size: int
    device: torch.device
    in_place: bool
    chunks: Sequence[SequenceChunk]
    rows: _Rows
    kept: TableRows | None

    def batch(self) -> AttentionBatch:
        tables: StepTables
        if isinstance(self.chunks, DecodeChunks):
            own = list(map(itemgetter(self.index), self.chunks.tables))
            if self.kept is not None and self.group.window is None:
                tables = self.kept.find(own)
            else:
                tables = SeparateTables(own)
        else:
            tables = SeparateTables([chunk.tables[self.index] for chunk in self.chunks])
        ends = self.rows.starts + self.rows.counts
        visible = visible_blocks(self.group, self.block_size, self.rows.queries, ends)
        classes = self._classes(visible.counts)
        groups: list[SequenceGroup] = []
        prefills: list[PrefillChunk] = []
        for key in dict.fromkeys(classes.tolist()):
            members = np.flatnonzero(classes == key)
            if key == _ALONE:
                prefills += [self._prefill_chunk(index, tables, visible) for index in members]
            else:
                parts = self._parts(members, visible)
                groups += [self._group(part, tables, visible) for part in parts]
        return AttentionBatch(self._slots(tables), tuple(groups), tuple(prefills))

    def _slots(self, tables: StepTables) -> Tensor:
        written = tables.written(self.rows.first_written, self.rows.end_written)
        assert written.all(), "the null block is never written"
        block_ids = written[self.rows.blocks]
        return self._tensor(block_ids * self.block_size + self.rows.offsets)

    def _classes(self, num_blocks: Integers) -> Integers:
        """A number for each chunk: those of one class are computed together, or else alone."""
        if isinstance(self.chunks, DecodeChunks):
            return np.zeros_like(num_blocks) if self.in_place else padding_class(num_blocks)
        counts = self.rows.counts
        is_long = (counts > MAX_GROUPED_ROWS) & ~self.rows.is_tree
        if self.in_place:
            # Decoding sequences, those with few tokens, and prompt chunks each share one table.
            return (counts > 1).astype(np.int64) + is_long
        classes = padding_class(counts) << 32 | padding_class(num_blocks)
        return np.where(is_long, _ALONE, classes)

    def _parts(self, members: Integers, visible: VisibleBlocks) -> list[Integers]:
        """Parts that need no more memory than a large chunk."""
        if self.in_place:
            return [members]
        num_rows = self.rows.counts[members].max()
        num_keys = visible.counts[members].max() * self.block_size
        size = max(MAX_GROUP_CELLS // int(num_rows * num_keys), 1)
        return [members[start : start + size] for start in range(0, len(members), size)]

    def _group(
        self, members: Integers, tables: StepTables, visible: VisibleBlocks
    ) -> SequenceGroup:
        visible = visible[members]
        num_blocks = int(visible.counts.max())
        counts = self.rows.counts[members, None]
        rows = self.rows.begins[members, None]
        width = counts.max()
        if width > 1:
            columns = np.arange(width)
            # A chunk's last row is computed again; in place, a row of -1 is no work.
            rows = rows + np.minimum(columns, counts - 1)
        places, hidden = self.rows.places[rows], None
        if self.rows.hidden is not None and self.rows.is_tree[members].any():
            hidden = self._tensor(self.rows.hidden[rows])
        if self.in_place and width > 1:
            rows[columns >= counts] = places[columns >= counts] = -1
        begins = None
        if self.group.window is not None:
            # Padding begins where the sequence ends: no query sees it.
            ends = self.rows.starts[members] + self.rows.counts[members]
            begins = self._tensor(visible.positions(self.block_size, ends, num_blocks))
        block_tables = tables.gather(members, visible, num_blocks)
        return SequenceGroup(
            rows=self._tensor(rows),
            positions=self._tensor(places),
            block_tables=self._tensor(block_tables),
            block_positions=begins,
            hidden=hidden,
        )

    def _prefill_chunk(
        self, index: int, tables: StepTables, visible: VisibleBlocks
    ) -> PrefillChunk:
        visible = visible[index : index + 1]
        num_blocks = int(visible.counts[0])
        (block_table,) = tables.gather(np.array([index]), visible, num_blocks)
        begins = None
        if self.group.window is not None:
            begins = self._tensor(visible.positions(self.block_size, 0, num_blocks)[0])
        start, num_tokens = int(self.rows.begins[index]), int(self.rows.counts[index])
        return PrefillChunk(
            start=start,
            end=start + num_tokens,
            context_len=self.chunks[index].end,
            block_table=self._tensor(block_table),
            block_positions=begins,
        )

    def _tensor(self, values: Integers) -> Tensor:
        return to_device(values, self.device)


def _ranges(starts: Integers, counts: Integers) -> Integers:
    """`range(start, start + count)` of each, one after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())
