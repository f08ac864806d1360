"""The layout of a step's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.engine.config import MAX_DRAFT_TOKENS
from loraplex.engine.execution.decode_inputs import DecodeLayout
from loraplex.engine.kv.groups import one_group
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model import inputs as inputs_module
from loraplex.engine.model.inputs import (
    MAX_GROUPED_ROWS,
    DecodeChunks,
    SequenceChunk,
    StepInputs,
    make_inputs,
    visible_blocks,
)
from loraplex.kernels.attention_window import AttentionWindow

BLOCK = 4


def make_chunk(
    num_tokens: int, start: int, *, kept: int = 1, tree: Sequence[int] | None = None
) -> SequenceChunk:
    table = block_table(range(1, 2 + (start + num_tokens) // BLOCK))
    return SequenceChunk(range(100, 100 + num_tokens), start, [table, table], kept, tree)


def lay_out(*chunks: SequenceChunk, groups: Sequence[KvGroup] | None = None) -> StepInputs:
    groups = groups or one_group(1, 100)
    return make_inputs(chunks, groups=groups, block_size=BLOCK, device=torch.device("cpu"))


def group_sizes(inputs: StepInputs) -> list[list[int]]:
    return [list(group.rows.shape) for group in inputs.attention[0].groups]


def test_sequences_of_similar_size_are_computed_as_one_wherever_they_stand() -> None:
    inputs = lay_out(
        make_chunk(1, 9),
        make_chunk(4, 50),
        make_chunk(1, 40),
        make_chunk(5, 50),
        make_chunk(3, 41),
        make_chunk(1, 12),
    )
    assert group_sizes(inputs) == [[2, 1], [2, 4], [1, 1], [1, 5]]
    assert inputs.attention[0].chunks == ()


def test_a_shorter_one_is_padded_with_its_last_token() -> None:
    (group,) = lay_out(make_chunk(3, 41), make_chunk(4, 50)).attention[0].groups
    assert group.rows.tolist() == [[0, 1, 2, 2], [3, 4, 5, 6]]
    assert group.positions.tolist() == [[41, 42, 43, 43], [50, 51, 52, 53]]


def test_long_chunks_are_computed_alone_but_trees_never() -> None:
    length = MAX_GROUPED_ROWS + 1
    tree = range(-1, length - 2)
    inputs = lay_out(
        make_chunk(length - 1, 0), make_chunk(length, 0), make_chunk(length, 0, tree=tree)
    )
    assert group_sizes(inputs) == [[1, length - 1], [1, length]]
    (chunk,) = inputs.attention[0].chunks
    assert (chunk.start, chunk.end, chunk.context_len) == (length - 1, 2 * length - 1, length)


def test_so_many_are_computed_as_one_that_their_masks_stay_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs_module, "MAX_GROUP_CELLS", 2 * 5 * 48)  # two of five rows
    laid_out = lay_out(
        *(make_chunk(5, 40) for _ in range(5)), *(make_chunk(1, 41) for _ in range(3))
    )
    assert group_sizes(laid_out) == [[2, 5], [2, 5], [1, 5], [3, 1]]
    rows = [row for group in laid_out.attention[0].groups for row in group.rows.flatten().tolist()]
    assert rows == list(range(28))
    monkeypatch.setattr(inputs_module, "MAX_GROUP_CELLS", 1)
    assert group_sizes(lay_out(make_chunk(5, 40), make_chunk(5, 40))) == [[1, 5]] * 2


def test_tokens_of_a_tree_stand_at_their_depth_and_lie_in_adjacent_slots() -> None:
    inputs = lay_out(make_chunk(2, 3), make_chunk(6, 7, kept=6, tree=[-1, -1, 0, 2, 1]))
    assert inputs.positions.tolist() == [3, 4, 7, 8, 8, 9, 10, 9]
    slots = inputs.attention[0].slot_mapping
    assert slots[2:].tolist() == list(range(BLOCK + 7, BLOCK + 13))
    assert inputs.logits_rows.tolist() == [1, *range(2, 8)]


def test_a_token_of_a_tree_sees_those_it_follows() -> None:
    tree = make_chunk(5, 7, tree=[-1, -1, 0])  # behind two known tokens
    (group,) = lay_out(tree, make_chunk(6, 7)).attention[0].groups
    assert group.hidden is not None
    words = group.hidden.tolist()
    # The second of the branches does not see the first, nor the third token the second.
    assert words == [[0, 0, 0, 0b10, 0b10, 0b10], [0] * 6]


def test_a_tree_of_the_most_draft_tokens_has_a_word_of_all_bits() -> None:
    siblings = make_chunk(65, 7, tree=[-1] * MAX_DRAFT_TOKENS)
    assert siblings.hidden == [0, 0, *((1 << index) - 2 for index in range(2, 65))]
    (group,) = lay_out(siblings).attention[0].groups
    assert group.hidden is not None
    assert group.hidden[0, -1] == -2


def test_a_window_is_read_from_the_first_position_that_any_row_sees() -> None:
    groups = (KvGroup((0,), None, 0, 50), KvGroup((1,), AttentionWindow(6), 2, 50))
    inputs = lay_out(make_chunk(4, 21, kept=4, tree=[-1, -1, -1]), groups=groups)
    everything, window = (attention.groups[0] for attention in inputs.attention)
    assert everything.block_positions is None
    assert everything.block_tables.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert window.block_tables.tolist() == [[1, 5, 6, 7]]
    assert window.block_positions is not None
    assert window.block_positions.tolist() == [[0, 16, 20, 24]]


def test_padding_of_a_window_begins_where_its_sequence_ends() -> None:
    groups = (KvGroup((0,), AttentionWindow(6), 2, 50),)
    inputs = lay_out(make_chunk(3, 21), make_chunk(4, 21), groups=groups)
    (group,) = inputs.attention[0].groups
    assert group.block_tables.tolist() == [[1, 5, 6, 0], [1, 5, 6, 7]]
    assert group.block_positions is not None
    assert group.block_positions.tolist() == [[0, 16, 20, 24], [0, 16, 20, 24]]
    ends = lay_out(make_chunk(2, 20), make_chunk(2, 23), groups=groups).attention[0].groups[0]
    assert ends.block_positions is not None
    assert ends.block_positions.tolist() == [[0, 12, 16, 20], [0, 16, 20, 24]]


def test_the_tokens_of_a_chunk_are_chunks_of_their_own() -> None:
    chunk = make_chunk(3, 5)
    tokens = DecodeChunks.of([chunk, make_chunk(1, 9)])
    assert [(list(token.token_ids), token.start) for token in tokens] == [
        *(([100], 5), ([101], 6), ([102], 7), ([100], 9))
    ]
    assert all(token.tables is chunk.tables for token in tokens[:3])


def test_the_tokens_of_a_tree_keep_what_they_do_not_see() -> None:
    tree = make_chunk(5, 7, tree=[-1, -1, 0])
    tokens = DecodeChunks.of([make_chunk(1, 9), tree])
    assert tokens.starts.tolist() == [9, 7, 8, 9, 10, 11]
    assert tokens.hidden == [0, 0, 0, 0, 0b10, 0b10]
    assert tokens.num_hidden.tolist() == [0, 0, 0, 0, 1, 1]
    assert tokens.padded(make_chunk(1, 0), 7).hidden == [*tokens.hidden, 0]


@pytest.mark.parametrize("window", range(1, 11))
@pytest.mark.parametrize("sinks", [0, 1, 4, 5])
def test_every_visible_position_is_in_one_block_of_a_table_that_is_no_wider_than_needed(
    window: int, sinks: int
) -> None:
    group = KvGroup((0,), AttentionWindow(window), sinks, 50)
    layout = DecodeLayout((group,), BLOCK, max_rows=1, max_model_len=40)
    width = layout.table_width(group)
    more = replace(layout, max_model_len=999, has_trees=True).table_width(group) - width
    assert more in (MAX_DRAFT_TOKENS // BLOCK - 1, MAX_DRAFT_TOKENS // BLOCK)
    widest = 0
    for start in range(40):
        blocks = visible_blocks(group, BLOCK, np.array([start]), np.array([start + 1]))
        (count,) = blocks.counts.tolist()
        (block_ids,) = blocks.gather([block_table(range(1, 11))], count).tolist()
        (positions,) = blocks.positions(BLOCK, 0, count).tolist()
        assert [1 + position // BLOCK for position in positions] == block_ids
        assert len({*block_ids}) == len(block_ids), "none is read twice"
        held = {first + offset for first in positions for offset in range(BLOCK)}
        assert {*range(min(sinks, start)), *range(max(start + 1 - window, 0), start + 1)} <= held
        widest = max(widest, count)
    assert widest == width


@pytest.mark.parametrize("num_tokens", [1, 5, MAX_GROUPED_ROWS + 1])
def test_the_null_block_is_never_written(num_tokens: int) -> None:
    with pytest.raises(AssertionError, match="null block"):
        lay_out(SequenceChunk([7] * num_tokens, 0, [block_table([0] * num_tokens)]))


def test_read_in_place_there_is_a_group_for_each_kind_of_span_and_padding_is_no_work() -> None:
    chunks = [
        make_chunk(1, 9),
        make_chunk(1, 90),
        make_chunk(2, 50),
        make_chunk(3, 9),
        make_chunk(20, 0),
        make_chunk(17, 40),
    ]
    inputs = make_inputs(
        chunks,
        groups=one_group(1, 100),
        block_size=BLOCK,
        device=torch.device("cpu"),
        in_place=True,
    )
    assert group_sizes(inputs) == [[2, 1], [2, 3], [2, 20]]
    assert inputs.attention[0].chunks == ()
    _, few, many = inputs.attention[0].groups
    assert few.rows.tolist() == [[2, 3, -1], [4, 5, 6]]
    assert few.positions.tolist() == [[50, 51, -1], [9, 10, 11]]
    assert many.rows[1].tolist() == [*range(27, 44), -1, -1, -1]
    assert many.positions[1].tolist() == [*range(40, 57), -1, -1, -1]
