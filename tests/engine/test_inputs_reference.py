"""A step's inputs against a plain loop over lists, for random chunks, windows and trees."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.engine.execution.decode_inputs import DecodeInputs, DecodeLayout
from loraplex.engine.kv.block_pool import NULL_BLOCK
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.kv.sequence_blocks import BlockTable, block_table
from loraplex.engine.model import inputs as inputs_module
from loraplex.engine.model.inputs import (
    MAX_GROUPED_ROWS,
    DecodeChunks,
    SequenceChunk,
    StepInputs,
    TableRows,
    VisibleBlocks,
    make_inputs,
)
from loraplex.kernels.attention import AttentionBatch
from loraplex.kernels.attention_window import AttentionWindow

CPU = torch.device("cpu")
BLOCK = 4
MAX_LEN = 120
GROUPS = (
    KvGroup((0,), None, 0, 999),
    KvGroup((1,), AttentionWindow(9), 0, 999),
    KvGroup((2,), AttentionWindow(7), 5, 999),
    KvGroup((3,), AttentionWindow(9, is_chunked=True), 0, 999),
)
MAX_GROUP_CELLS = 600
"""So few that groups are cut into parts."""


class Visible(NamedTuple):
    block_ids: list[int]
    positions: list[int]


def first_seen(position: int, group: KvGroup) -> int:
    if group.window is None:
        return 0
    if group.window.is_chunked:
        return position - position % group.window.size
    return position - group.window.size + 1


def visible_blocks(table: Sequence[int], start: int, end: int, group: KvGroup) -> Visible:
    """Block by block: whether a query of the chunk sees one of its positions."""
    seen = []
    for block in range(-(-end // BLOCK)):
        last = block * BLOCK + BLOCK - 1
        if last >= first_seen(start, group) or block * BLOCK < group.sinks:
            seen.append(block)
    return Visible([table[block] for block in seen], [block * BLOCK for block in seen])


def padded(values: Sequence[int], padding: int, width: int) -> list[int]:
    return [*values, *[padding] * (width - len(values))]


def num_cached_draft_tokens(chunk: SequenceChunk) -> int:
    """How many tokens of the tree lie before the chunk."""
    return max(len(chunk.tree or ()) - len(chunk.token_ids), 0)


def ancestors(chunk: SequenceChunk) -> list[list[int]]:
    """For each token of the tree and the chunk the indices of those that it follows, the nearest
    first."""
    tree, num_tokens = chunk.tree or (), num_cached_draft_tokens(chunk) + len(chunk.token_ids)
    first = num_tokens - len(tree)
    found: list[list[int]] = []
    for index in range(num_tokens):
        parent = index - 1 if index < first else first + tree[index - first]
        found.append([parent, *found[parent]] if parent >= 0 else [])
    return found


def positions(chunk: SequenceChunk) -> list[int]:
    num_cached = num_cached_draft_tokens(chunk)
    return [chunk.start - num_cached + len(own) for own in ancestors(chunk)[num_cached:]]


def hidden(chunk: SequenceChunk) -> list[int]:
    words = []
    for index, own in enumerate(ancestors(chunk)):
        others = set(range(index)) - set(own)
        words.append(sum(1 << index - other for other in others))
    return words[num_cached_draft_tokens(chunk) :]


def first_query(chunk: SequenceChunk) -> int:
    """The least place that a token of the chunk would have without other branches."""
    return min(positions(chunk)) - chunk.num_evicted


class Expected:
    """One group's view of a step, chunk by chunk."""

    def __init__(self, chunks: Sequence[SequenceChunk], index: int, *, in_place: bool) -> None:
        self._chunks, self._index, self._group = chunks, index, GROUPS[index]
        self._in_place = in_place
        self._starts = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)]).tolist()
        self.slots = [
            chunk.tables[index].tolist()[position // BLOCK] * BLOCK + position % BLOCK
            for chunk in chunks
            for position in range(chunk.place, chunk.end)
        ]
        self.seen = [
            visible_blocks(chunk.tables[index].tolist(), first_query(chunk), chunk.end, self._group)
            for chunk in chunks
        ]
        self._classes: dict[Hashable, list[int]] = {}
        self.alone: list[int] = []
        for number, chunk in enumerate(chunks):
            is_long = len(chunk.token_ids) > MAX_GROUPED_ROWS and chunk.tree is None
            if is_long and not in_place:
                self.alone.append(number)
            else:
                self._classes.setdefault(self._class_of(number), []).append(number)

    def _class_of(self, number: int) -> Hashable:
        num_tokens, tree = len(self._chunks[number].token_ids), self._chunks[number].tree
        if not self._in_place:
            num_blocks = len(self.seen[number].block_ids)
            return (num_tokens - 1).bit_length(), (num_blocks - 1).bit_length()
        return num_tokens > 1, num_tokens > MAX_GROUPED_ROWS and tree is None

    def groups(self) -> list[list[int]]:
        """The chunks that are computed together."""
        groups = []
        for members in self._classes.values():
            num_rows = max(len(self._chunks[number].token_ids) for number in members)
            num_keys = BLOCK * max(len(self.seen[number].block_ids) for number in members)
            size = max(MAX_GROUP_CELLS // (num_rows * num_keys), 1)
            size = len(members) if self._in_place else size
            groups += [members[first : first + size] for first in range(0, len(members), size)]
        return groups

    def check_group(self, members: Sequence[int], batch: AttentionBatch, number: int) -> None:
        found = batch.groups[number]
        chunks, seen = [self._chunks[i] for i in members], [self.seen[i] for i in members]
        num_rows = max(len(chunk.token_ids) for chunk in chunks)
        width = max(len(blocks.block_ids) for blocks in seen)
        rows = [range(self._starts[i], self._starts[i + 1]) for i in members]
        places = [range(chunk.place, chunk.end) for chunk in chunks]

        def filled(parts: Sequence[Sequence[int]]) -> list[list[int]]:
            return [padded(part, -1 if self._in_place else part[-1], num_rows) for part in parts]

        assert found.rows.tolist() == filled(rows)
        assert found.positions.tolist() == filled(places)
        tables = [padded(blocks.block_ids, NULL_BLOCK, width) for blocks in seen]
        assert found.block_tables.tolist() == tables
        if self._group.window is None:
            assert found.block_positions is None
        else:
            assert found.block_positions is not None
            assert found.block_positions.tolist() == [
                padded(blocks.positions, chunk.end, width)
                for blocks, chunk in zip(seen, chunks, strict=True)
            ]
        assert (found.hidden is None) == all(chunk.tree is None for chunk in chunks)
        if found.hidden is not None:
            words = [padded(own, own[-1], num_rows) for own in map(hidden, chunks)]
            assert found.hidden.tolist() == words

    def check_alone(self, batch: AttentionBatch) -> None:
        for number, found in zip(self.alone, batch.chunks, strict=True):
            chunk, blocks = self._chunks[number], self.seen[number]
            assert (found.start, found.end) == (self._starts[number], self._starts[number + 1])
            assert found.context_len == chunk.end
            assert found.block_table.tolist() == blocks.block_ids
            if self._group.window is not None:
                assert found.block_positions is not None
                assert found.block_positions.tolist() == blocks.positions


ROTARY_STARTS = (0, 0, 0, 70, 300)
MAX_CACHED_DRAFT_TOKENS = 20
"""Of a tree before a chunk of it."""


def random_tables(rng: random.Random, num_tokens: int) -> list[BlockTable]:
    """Enough for so many tokens, sometimes more."""
    num_blocks = -(-num_tokens // BLOCK) + rng.choice((0, 0, 1, 3))
    return [block_table([rng.randrange(1, 999) for _ in range(num_blocks)]) for _ in GROUPS]


def random_chunk(rng: random.Random) -> SequenceChunk:
    start = rng.choice((0, rng.randrange(12), rng.randrange(MAX_LEN)))
    count = rng.choice((1, 1, 1, 2, 3, 5, 8, MAX_GROUPED_ROWS, MAX_GROUPED_ROWS + 1, 30))
    tree = None
    if count > 1 and rng.random() < 0.3:
        num_draft_tokens = rng.randrange(1, count + min(start, MAX_CACHED_DRAFT_TOKENS))
        tree = [rng.randrange(-1, index) for index in range(num_draft_tokens)]
    token_ids = [rng.randrange(1000) for _ in range(count)]
    kept, tables = rng.randint(0, count), random_tables(rng, start + count)
    evicted = rng.choice((0, rng.randrange(500)))
    return SequenceChunk(
        token_ids,
        start + evicted,
        tables,
        kept,
        tree,
        num_evicted=evicted,
        rotary_start=rng.choice(ROTARY_STARTS),
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_inputs_are_those_of_a_loop_over_lists(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(inputs_module, "MAX_GROUP_CELLS", MAX_GROUP_CELLS)
    rng = random.Random(in_place)
    for _ in range(150):
        chunks = [random_chunk(rng) for _ in range(rng.randint(1, 12))]
        found = make_inputs(chunks, groups=GROUPS, block_size=BLOCK, device=CPU, in_place=in_place)
        check(found, chunks, in_place=in_place)


def check(found: StepInputs, chunks: Sequence[SequenceChunk], *, in_place: bool) -> None:
    assert found.input_ids.tolist() == [token for chunk in chunks for token in chunk.token_ids]
    assert found.positions.tolist() == [each for chunk in chunks for each in positions(chunk)]
    if any(chunk.rotary_start for chunk in chunks):
        assert found.rotary_rows is not None
        assert found.rotary_rows.tolist() == [
            chunk.rotary_start + position for chunk in chunks for position in positions(chunk)
        ]
    else:
        assert found.rotary_rows is None
    kept: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        kept += range(end - chunk.num_logits_rows, end)
    assert found.logits_rows.tolist() == kept
    for index, batch in enumerate(found.attention):
        expected = Expected(chunks, index, in_place=in_place)
        assert batch.slot_mapping.tolist() == expected.slots
        groups = expected.groups()
        assert len(batch.groups) == len(groups)
        for number, members in enumerate(groups):
            expected.check_group(members, batch, number)
        expected.check_alone(batch)


@pytest.mark.parametrize("in_place", [False, True])
def test_inputs_of_decodes_are_those_of_a_loop_over_lists_after_any_steps_before(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(inputs_module, "MAX_GROUP_CELLS", MAX_GROUP_CELLS)
    rng = random.Random(in_place)
    decoding, kept = Decoding(rng), [TableRows() for _ in GROUPS]
    for _ in range(200):
        decoding.advance(12)
        found = make_inputs(
            DecodeChunks.of(decoding.chunks),
            groups=GROUPS,
            block_size=BLOCK,
            device=CPU,
            in_place=in_place,
            table_rows=kept,
        )
        check(found, decoding.chunks, in_place=in_place)


def test_tables_are_right_after_their_rows_were_given_to_others() -> None:
    kept, visible = TableRows(), VisibleBlocks(*np.array([[0, 0], [0, 0], [2, 2]]))
    tables = [block_table([1, 2]), block_table([3, 4])]
    for step in range(20):
        found = kept.find(tables).gather(np.arange(2), visible, 2)
        assert found.tolist() == [table.tolist() for table in tables]
        # The first table is kept until the others have taken the eight rows of two sequences.
        new = block_table([10 + step, 40 + step])
        tables = [new, tables[1]] if step % 7 == 6 else [tables[0], new]


def test_decodes_by_column_are_the_chunks_that_they_were_made_of() -> None:
    decoding = Decoding(random.Random(0))
    decoding.advance(12)
    chunks = decoding.chunks
    columns = DecodeChunks.of(chunks)
    assert DecodeChunks.of(columns) is columns
    assert list(columns) == chunks
    assert columns[1:3] == chunks[1:3]
    padded = columns.padded(chunks[0], len(chunks) + 2)
    assert list(padded) == [*chunks, chunks[0], chunks[0]]


class Decoding:
    """Sequences that come, grow, lose and change blocks, and go, as those of a step do."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.chunks: list[SequenceChunk] = []

    def advance(self, most: int) -> None:
        rng = self._rng
        kept = [chunk for chunk in self.chunks if rng.random() > 0.1 and chunk.end < MAX_LEN - 1]
        self.chunks = [self._next(chunk) for chunk in kept]
        while len(self.chunks) < rng.randint(1, most):
            place, evicted = rng.randrange(MAX_LEN - 1), rng.choice((0, rng.randrange(9)))
            tables, start = random_tables(rng, place + 1), place + evicted
            rotary_start = rng.choice(ROTARY_STARTS)
            self.chunks.append(
                SequenceChunk(
                    [start], start, tables, num_evicted=evicted, rotary_start=rotary_start
                )
            )
        if rng.random() < 0.2:
            rng.shuffle(self.chunks)
        del self.chunks[most:]

    def _next(self, chunk: SequenceChunk) -> SequenceChunk:
        tables, rng = list(chunk.tables), self._rng
        start = chunk.start + (rng.random() < 0.8)
        for index, table in enumerate(tables):
            block_ids = table.tolist()
            if (start - chunk.num_evicted) // BLOCK >= len(block_ids):
                tables[index] = block_table([*block_ids, rng.randrange(1, 999)])
            elif rng.random() < 0.1:  # copied on write, or found in the prefix cache
                block_ids[rng.randrange(len(block_ids))] = rng.randrange(1, 999)
                tables[index] = block_table(block_ids)
        return chunk._replace(token_ids=[start], start=start, tables=tables)


@pytest.mark.parametrize("has_rotary_rows", [False, True])
def test_a_graph_s_rows_are_those_of_a_loop_over_lists_after_any_steps_before(
    has_rotary_rows: bool,
) -> None:
    rng, most = random.Random(0), 7
    layout = DecodeLayout(GROUPS, BLOCK, most, MAX_LEN, has_rotary_rows=has_rotary_rows)
    spare_blocks = [group.num_blocks for group in GROUPS]
    inputs, decoding = DecodeInputs(layout, spare_blocks, CPU), Decoding(rng)
    padding = SequenceChunk([0], 0, [block_table([block]) for block in spare_blocks])
    for _ in range(400):
        decoding.advance(most)
        num_rows = rng.randint(len(decoding.chunks), most)
        inputs.fill(decoding.chunks, [-1] * len(decoding.chunks), num_rows=num_rows)
        chunks = [*decoding.chunks, *[padding] * (num_rows - len(decoding.chunks))]
        assert inputs.input_ids(num_rows).tolist() == [chunk.token_ids[0] for chunk in chunks]
        assert inputs.positions(num_rows).tolist() == [chunk.start for chunk in chunks]
        rotary_rows = inputs.rotary_rows(num_rows)
        assert (rotary_rows is not None) == has_rotary_rows
        if rotary_rows is not None:
            expected_rows = [chunk.rotary_start + chunk.start for chunk in chunks]
            assert rotary_rows.tolist() == expected_rows
        for index, batch in enumerate(inputs.attention(num_rows)):
            expected = Expected(chunks, index, in_place=True)
            assert batch.slot_mapping.tolist() == expected.slots
            (found,), width = batch.groups, layout.table_width(GROUPS[index])
            tables = [padded(blocks.block_ids, NULL_BLOCK, width) for blocks in expected.seen]
            assert found.block_tables.tolist() == tables
            assert found.positions.flatten().tolist() == [chunk.place for chunk in chunks]
            if found.block_positions is not None:
                begins = [padded(blocks.positions, 2 * MAX_LEN, width) for blocks in expected.seen]
                assert found.block_positions.tolist() == begins


def test_a_graph_s_rows_are_the_tokens_of_any_chunks_after_any_steps_before() -> None:
    rng, most = random.Random(0), 40
    layout = DecodeLayout(GROUPS, BLOCK, most, 2 * MAX_LEN, has_rotary_rows=True, has_trees=True)
    inputs = DecodeInputs(layout, [group.num_blocks for group in GROUPS], CPU)
    for _ in range(100):
        chunks = [random_chunk(rng) for _ in range(rng.randint(1, 3))]
        while sum(len(chunk.token_ids) for chunk in chunks) > most:
            chunks.pop()
        tokens = [
            (chunk, *token)
            for chunk in chunks
            for token in zip(range(chunk.place, chunk.end), positions(chunk), strict=True)
        ]
        num_rows = len(tokens)
        inputs.fill(chunks, [-1] * num_rows, num_rows=num_rows)
        expected = [token for chunk in chunks for token in chunk.token_ids]
        assert inputs.input_ids(num_rows).tolist() == expected
        assert inputs.positions(num_rows).tolist() == [position for *_, position in tokens]
        rotary_rows = inputs.rotary_rows(num_rows)
        assert rotary_rows is not None
        expected = [chunk.rotary_start + position for chunk, _, position in tokens]
        assert rotary_rows.tolist() == expected
        for index, batch in enumerate(inputs.attention(num_rows)):
            assert batch.slot_mapping.tolist() == Expected(chunks, index, in_place=True).slots
            check_rows(batch, tokens, index, layout)
            assert batch.groups[0].hidden is not None
            words = [word for chunk in chunks for word in hidden(chunk)]
            assert batch.groups[0].hidden.flatten().tolist() == words


def check_rows(
    batch: AttentionBatch,
    tokens: Sequence[tuple[SequenceChunk, int, int]],
    index: int,
    layout: DecodeLayout,
) -> None:
    """`tokens`: each one's chunk, place and position."""
    (found,), width = batch.groups, layout.table_width(GROUPS[index])
    assert found.positions.flatten().tolist() == [place for _, place, _ in tokens]
    seen = [
        visible_blocks(
            chunk.tables[index].tolist(), position - chunk.num_evicted, place + 1, GROUPS[index]
        )
        for chunk, place, position in tokens
    ]
    tables = [padded(blocks.block_ids, NULL_BLOCK, width) for blocks in seen]
    assert found.block_tables.tolist() == tables
    if found.block_positions is not None:
        begins = [padded(blocks.positions, 4 * MAX_LEN, width) for blocks in seen]
        assert found.block_positions.tolist() == begins


def test_rows_whose_tables_did_not_change_are_not_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = DecodeLayout(GROUPS[:1], BLOCK, 4, MAX_LEN)
    inputs = DecodeInputs(layout, [999], CPU)
    tables = [[block_table(range(1, 5 + number))] for number in range(4)]
    copied: list[list[int]] = []
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda *args: copied.append(args[2].tolist()))

    def fill(*positions: int) -> list[int]:
        pairs = zip(positions, tables, strict=True)
        chunks = [SequenceChunk([7], position, own) for position, own in pairs]
        inputs.fill(chunks, [-1] * 4, num_rows=4)
        return copied.pop() if copied else []

    assert fill(10, 10, 10, 10) == [0, 1, 2, 3]
    assert fill(11, 11, 11, 11) == []
    assert fill(11, 12, 11, 11) == [1]
    tables[3] = [block_table([9, 8, 7, 6])]
    assert fill(11, 13, 11, 11) == [3]


class Failing:
    """Whose pending tokens cannot be put in their places."""

    def __init__(self) -> None:
        self.sources: list[int] = []

    def fill(self, input_ids: Tensor, sources: Tensor) -> None:
        raise MemoryError


@pytest.mark.parametrize("num_rows", [4, 2])
def test_inputs_that_failed_leave_no_slot_to_a_later_step(num_rows: int) -> None:
    layout = DecodeLayout(GROUPS[:1], BLOCK, 4, MAX_LEN)
    inputs = DecodeInputs(layout, [999], CPU)

    def chunks(first: int) -> list[SequenceChunk]:
        return [
            SequenceChunk([7], 10, [tables[first + number]], num_evicted=0) for number in range(4)
        ]

    def slots(some: list[SequenceChunk]) -> list[int]:
        inputs.fill(some, [-1] * len(some), num_rows=len(some))
        (batch,) = inputs.attention(len(some))
        found: list[int] = batch.slot_mapping.tolist()
        return found

    tables = [block_table(range(1 + 20 * number, 9 + 20 * number)) for number in range(8)]
    expected = slots(chunks(0))
    with pytest.raises(MemoryError):
        inputs.fill(chunks(4), [-1] * 4, num_rows=4, pending=Failing())
    assert slots(chunks(0)[:num_rows]) == expected[:num_rows]
    assert slots(chunks(0)) == expected


def test_a_block_table_cannot_be_changed_in_place() -> None:
    table = block_table([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 3
    with pytest.raises(ValueError, match="read-only"):
        table[:1][0] = 3
