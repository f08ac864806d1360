from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.block_pool import NULL_BLOCK
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.layout import CopyBlock, KvGroup, SwapIn, SwapOut, ZeroBlocks
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import SequenceBlocks, block_table
from loraplex.kernels.attention_window import AttentionWindow
from support.block_tables import tables_of

SIZE = 4
ADAPTER = AdapterKey("acme", "sha256:aa")
NAMESPACE = CacheNamespace("acme", "runtime", ADAPTER)


def full(num_blocks: int) -> KvGroup:
    """A group of so many usable blocks whose queries see everything."""
    return KvGroup((0,), None, 0, num_blocks + 1)


def windowed(num_blocks: int, window: int, sinks: int = 0) -> KvGroup:
    return KvGroup((1,), AttentionWindow(window), sinks, num_blocks + 1)


def chunked(num_blocks: int, size: int) -> KvGroup:
    return KvGroup((1,), AttentionWindow(size, is_chunked=True), 0, num_blocks + 1)


def make_blocks(*groups: KvGroup, caching: bool = True, slots: Sequence[int] = ()) -> KvBlocks:
    return KvBlocks(
        groups, SIZE, prefix_secret=b"s" * 32 if caching else None, num_swap_slots=slots
    )


def compute(
    kv: KvBlocks, token_ids: Sequence[int], *, seq: SequenceBlocks | None = None, start: int = 0
) -> SequenceBlocks:
    """All these tokens in one step."""
    seq = seq or kv.new_sequence()
    assert kv.grow(seq, start, len(token_ids) - start)
    kv.advance(seq, NAMESPACE, token_ids, len(token_ids))
    return seq


# --- growing --------------------------------------------------------------------------------------


def test_a_sequence_grows_in_all_groups_or_in_none() -> None:
    kv = make_blocks(full(4), full(2))
    seq = kv.new_sequence()
    assert kv.num_missing(seq, 0, 9) == (3, 3)
    assert not kv.grow(seq, 0, 9)
    assert (kv.num_free(0), kv.num_free(1)) == (4, 2)
    assert kv.grow(seq, 0, 8)
    assert [len(table) for table in tables_of(seq)] == [2, 2]
    assert (kv.num_free(0), kv.num_free(1)) == (2, 0)
    assert kv.share(seq) == 1.0
    kv.check_integrity([seq])


def test_blocks_behind_the_known_tokens_are_given_back_in_all_groups_and_handed_out_first() -> None:
    kv = make_blocks(full(8), windowed(8, window=5))
    others = compute(kv, range(100, 108))
    kv.release(others)
    seq = compute(kv, range(6))
    assert kv.grow(seq, 6, 12)
    spare = [set(table[2:]) for table in tables_of(seq)]
    kv.shrink(seq, 7)
    assert [len(table) for table in tables_of(seq)] == [2, 2]
    assert seq.num_writable == 8
    kv.check_integrity([seq])
    another = kv.new_sequence()
    assert kv.grow(another, 0, 12)
    assert [set(table) for table in tables_of(another)] == spare
    assert kv.match(kv.new_sequence(), NAMESPACE, range(100, 109)) == 8, "the cached ones stayed"


def test_a_sequence_that_holds_no_more_than_it_needs_shrinks_by_nothing() -> None:
    kv = make_blocks(full(8))
    seq = compute(kv, range(8))
    table = tables_of(seq)[0]
    kv.shrink(seq, 8)
    kv.shrink(seq, 5)
    assert tables_of(seq) == [table]


def test_new_blocks_are_zeroed_before_they_are_written() -> None:
    kv = make_blocks(full(4), full(4))
    first, second = kv.new_sequence(), kv.new_sequence()
    kv.grow(first, 0, 5)
    kv.grow(second, 0, 1)
    assert kv.operations.take() == [
        ZeroBlocks(group, (*tables_of(first)[group], *tables_of(second)[group])) for group in (0, 1)
    ]
    assert kv.grow(first, 5, 3)  # within its blocks
    assert kv.operations.take() == []


def test_a_block_that_changes_hands_within_a_step_is_zeroed_after_it_was_saved() -> None:
    kv = make_blocks(full(1), caching=False, slots=[1])
    first, second = compute(kv, [1]), kv.new_sequence()
    kv.operations.take()
    assert kv.swap_out(first, 1)
    assert kv.grow(second, 0, 1)
    assert kv.operations.take() == [SwapOut(0, (1,), (0,)), ZeroBlocks(0, (1,))]


def test_releasing_twice_changes_nothing() -> None:
    kv = make_blocks(full(4), slots=[4])
    other, seq = compute(kv, [1] * 8), compute(kv, [2] * 8)
    for _ in range(2):
        kv.release(seq)
        kv.check_integrity([other])
        assert kv.num_free(0) == 2


def test_a_released_sequence_starts_anew() -> None:
    kv = make_blocks(full(4), windowed(4, window=8))
    tokens = list(range(8))
    seq = compute(kv, tokens)
    kv.release(seq)
    kv.drop_adapter(ADAPTER)
    assert kv.grow(seq, 0, 1)
    assert [len(table) for table in tables_of(seq)] == [1, 1]
    compute(kv, tokens, seq=seq, start=0)
    kv.check_integrity([seq])
    assert kv.match(kv.new_sequence(), NAMESPACE, [*tokens, 0]) == 8


def test_what_may_run_alone_is_bounded_by_the_smallest_group_without_a_window() -> None:
    kv = make_blocks(full(5), full(3), windowed(5, window=8))
    assert kv.longest(chunk=4) == 12
    assert kv.fits_alone(12, chunk=4)
    assert not kv.fits_alone(13, chunk=4)


def test_the_parts_of_the_blocks_that_are_held_published_and_free_are_told() -> None:
    kv = make_blocks(full(8))
    (group,) = kv.groups
    assert (group.used_fraction, group.layout.num_usable) == (0.0, 8)
    seq, other = compute(kv, range(6)), compute(kv, range(10, 15))
    assert (group.used_fraction, kv.share(seq), group.cached.num_unheld) == (0.5, 0.25, 0)
    published = tables_of(other)[0][0]
    kv.release(other)
    assert (group.used_fraction, group.cached.num_unheld) == (0.25, 1)
    assert published in group.cached
    assert tables_of(seq)[0][1] not in group.cached


def test_tables_stay_integers_that_nobody_can_write() -> None:
    kv = make_blocks(full(8), windowed(8, window=4), slots=[8, 8])
    seq, child = compute(kv, range(7)), kv.new_sequence()

    def check(*sequences: SequenceBlocks) -> None:
        for table in (table for seq in sequences for table in seq.tables):
            assert table.dtype == np.int64
            assert not table.flags.writeable

    check(seq, child)
    assert kv.fork(seq, child, 6)
    assert kv.grow(child, 6, 1)
    compute(kv, range(14), seq=seq, start=7)
    check(seq, child)
    assert kv.swap_out(seq, 14)
    check(seq)
    assert kv.grow(seq, 14, 6)
    kv.shrink(seq, 15)
    check(seq)


def test_a_lost_slot_and_a_table_that_lacks_a_block_are_found() -> None:
    kv = make_blocks(full(4), slots=[4])
    seq = compute(kv, [1] * 8)
    kv.swap_out(seq, 8)
    with pytest.raises(AssertionError, match="host slot 0"):
        kv.check_integrity([])
    seq.tables[0] = block_table([NULL_BLOCK] * 3)
    with pytest.raises(AssertionError, match="block 2 of a table is 0"):
        kv.check_integrity([seq])


def test_a_block_that_is_published_as_anothers_is_found() -> None:
    kv = make_blocks(full(4))
    seq = compute(kv, [1] * 8)
    seq.chain.reverse()
    with pytest.raises(AssertionError, match="published as another's"):
        kv.check_integrity([seq])


def test_a_leak_and_a_double_owner_are_found() -> None:
    kv = make_blocks(full(4))
    seq = compute(kv, [1] * 8)
    with pytest.raises(AssertionError, match="holders"):
        kv.check_integrity([])
    with pytest.raises(AssertionError, match="holders"):
        kv.check_integrity([seq, seq])


# --- prefixes -------------------------------------------------------------------------------------


def test_only_blocks_whose_step_has_finished_are_found() -> None:
    kv = make_blocks(full(8))
    writer, reader = kv.new_sequence(), kv.new_sequence()
    tokens = list(range(9))
    kv.grow(writer, 0, 9)
    assert kv.match(reader, NAMESPACE, tokens) == 0
    kv.advance(writer, NAMESPACE, tokens, 7)
    assert kv.match(reader, NAMESPACE, tokens) == 4
    kv.release(reader)
    kv.advance(writer, NAMESPACE, tokens, 9)
    assert kv.match(reader, NAMESPACE, tokens) == 8
    assert tables_of(reader) == [tables_of(writer)[0][:2]]


def test_at_least_one_token_is_left_to_compute() -> None:
    kv = make_blocks(full(8))
    compute(kv, list(range(8)))
    assert kv.match(kv.new_sequence(), NAMESPACE, list(range(8))) == 4


def test_without_a_secret_nothing_is_cached() -> None:
    kv = make_blocks(full(8), caching=False)
    compute(kv, list(range(8)))
    assert kv.match(kv.new_sequence(), NAMESPACE, list(range(9))) == 0
    assert len(kv.groups[0].cached) == 0


def test_who_computed_known_content_goes_on_with_the_cached_block() -> None:
    kv = make_blocks(full(8))
    first, second = kv.new_sequence(), kv.new_sequence()
    for seq in (first, second):  # neither finds the other's: both compute in one step
        assert kv.grow(seq, 0, 9)
    for seq in (first, second):
        kv.advance(seq, NAMESPACE, list(range(9)), 9)
    assert tables_of(first)[0][:2] == tables_of(second)[0][:2]
    assert tables_of(first)[0][2] != tables_of(second)[0][2]
    assert kv.num_free(0) == 4
    kv.check_integrity([first, second])


def test_a_second_copy_of_known_content_is_reused_before_what_is_cached() -> None:
    kv = make_blocks(full(8))
    kv.release(compute(kv, list(range(9, 18))))
    first, second = kv.new_sequence(), kv.new_sequence()
    for seq in (first, second):
        assert kv.grow(seq, 0, 9)
    num_evictions = kv.groups[0].cached.num_evictions
    for seq in (first, second):
        kv.advance(seq, NAMESPACE, list(range(9)), 9)
    assert kv.grow(kv.new_sequence(), 0, 2 * SIZE)
    assert kv.groups[0].cached.num_evictions == num_evictions


def test_prefixes_are_evicted_from_their_leaves() -> None:
    kv = make_blocks(full(4))
    tokens = list(range(16))
    kv.release(compute(kv, tokens))
    for num_taken, num_freed in ((1, 12), (2, 8), (3, 4)):
        other = kv.new_sequence()
        assert kv.grow(other, 0, num_taken * SIZE)
        kv.release(other)
        found = kv.new_sequence()
        assert kv.match(found, NAMESPACE, [*tokens, 0]) == num_freed
        kv.release(found)
        assert kv.groups[0].cached.num_evictions == num_taken


def test_dropping_an_adapter_forgets_its_prefixes_in_every_group() -> None:
    kv = make_blocks(full(8), windowed(8, window=8))
    kv.release(compute(kv, list(range(8))))
    assert kv.drop_adapter(AdapterKey("acme", "sha256:ab")) == 0
    assert kv.drop_adapter(ADAPTER) == 4
    assert kv.match(kv.new_sequence(), NAMESPACE, list(range(9))) == 0


def test_a_block_counts_only_behind_the_same_blocks_even_of_those_that_no_query_sees() -> None:
    kv = make_blocks(windowed(8, window=4))
    first, second, third = ([token] * SIZE for token in (1, 2, 3))
    kv.release(compute(kv, [*first, *second, *third]))
    assert kv.match(kv.new_sequence(), NAMESPACE, [*first, *second, *third, 0]) == 12
    assert kv.match(kv.new_sequence(), NAMESPACE, [*first, *first, *third, 0]) == 4


# --- windows --------------------------------------------------------------------------------------


def test_what_a_window_leaves_behind_is_freed_but_sinks_stay() -> None:
    kv = make_blocks(full(8), windowed(8, window=6, sinks=2))
    tokens = list(range(20))
    seq = compute(kv, tokens[:9])
    assert NULL_BLOCK not in tables_of(seq)[1]  # the query at 9 sees from 4 on, a fork's from 3 on
    compute(kv, tokens[:14], seq=seq, start=9)
    assert [block_id == NULL_BLOCK for block_id in tables_of(seq)[1]] == [False, True, False, False]
    assert NULL_BLOCK not in tables_of(seq)[0]
    assert (kv.num_free(0), kv.num_free(1)) == (4, 5)
    assert (kv.share(seq), kv.groups[1].num_held(seq)) == (0.5, 3)
    kv.check_integrity([seq])


def test_endless_generation_needs_no_more_than_sinks_and_window() -> None:
    kv = make_blocks(windowed(5, window=8, sinks=1), caching=False)
    assert kv.longest(chunk=1) == sys.maxsize
    assert kv.longest(chunk=12) == 20, "what a refusal says"
    assert kv.fits_alone(10**6, chunk=1)
    assert not kv.fits_alone(10**6, chunk=12)
    seq, tokens = kv.new_sequence(), [0] * 200
    for position in range(200):
        assert kv.grow(seq, position, 1)
        kv.advance(seq, NAMESPACE, tokens, position + 1)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("sinks", [0, 1, 5])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_the_peak_is_exactly_what_a_sequence_comes_to_hold(
    window: int, sinks: int, chunk: int
) -> None:
    group = windowed(40, window, sinks)
    kv = make_blocks(group, caching=False)
    peak = 0
    for start in range(1, chunk + 1):  # every alignment of the chunks
        seq, computed = kv.new_sequence(), 0
        for num_tokens in (start, *[chunk] * 25):
            assert kv.grow(seq, computed, num_tokens)
            computed += num_tokens
            peak = max(peak, 40 - kv.num_free(0))
            kv.advance(seq, NAMESPACE, [0] * computed, computed)
        kv.release(seq)
    assert peak <= group.peak_blocks(10**6, chunk, SIZE) <= peak + 1


@pytest.mark.parametrize("size", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_the_peak_suffices_for_chunked_attention(size: int, step: int) -> None:
    group, peak = chunked(40, size), 0
    kv = make_blocks(group, caching=False)
    for start in range(1, step + 1):  # every alignment of the steps
        seq, computed = kv.new_sequence(), 0
        for num_tokens in (start, *[step] * 25):
            assert kv.grow(seq, computed, num_tokens)
            computed += num_tokens
            peak = max(peak, 40 - kv.num_free(0))
            kv.advance(seq, NAMESPACE, [0] * computed, computed)
        kv.release(seq)
    assert peak <= group.peak_blocks(10**6, step, SIZE) <= peak + 1


def test_blocks_of_a_chunk_are_freed_once_the_next_one_has_begun() -> None:
    """One token later: a fork may compute the last token again."""
    kv = make_blocks(chunked(8, size=8))
    seq, freed = kv.new_sequence(), []
    for num_computed in (8, 9, 15, 16, 17):
        start = num_computed - 1 if num_computed in (9, 16, 17) else num_computed // 9 * 9
        compute(kv, range(num_computed), seq=seq, start=start)
        freed.append(tables_of(seq)[0].count(NULL_BLOCK))
    assert freed == [0, 2, 2, 2, 4]


@pytest.mark.parametrize(
    ("num_tokens", "lost", "hit"),
    [
        (24, 4, 16),  # 24 begins a chunk, and nothing before it is read; see below
        (21, 4, 16),
        (21, 3, 20),
        (13, 2, 8),
        (13, 1, 12),
    ],
)
def test_a_hit_needs_the_present_chunk_alone(num_tokens: int, lost: int, hit: int) -> None:
    """With chunks of 8: 16 to 23 is the present one after 20 tokens, and empty after 16."""
    kv = make_blocks(full(16), chunked(16, size=8))
    seq = compute(kv, range(24))
    block = kv.groups[1].cached.find(seq.chain[lost])
    assert block is not None
    kv.release(seq)
    kv.groups[1].cached.forget(block)
    assert kv.match(kv.new_sequence(), NAMESPACE, range(num_tokens)) == hit


def test_a_hit_at_a_chunk_s_start_needs_no_block_of_chunked_layers() -> None:
    kv = make_blocks(full(16), chunked(16, size=8))
    seq = compute(kv, range(24))
    kv.release(seq)
    for prefix in seq.chain:
        if (block := kv.groups[1].cached.find(prefix)) is not None:
            kv.groups[1].cached.forget(block)
    found = kv.new_sequence()
    assert kv.match(found, NAMESPACE, range(25)) == 24
    assert tables_of(found)[1] == [NULL_BLOCK] * 6
    compute(kv, range(25), seq=found, start=24)
    kv.check_integrity([found])


def test_a_prompt_computed_in_chunks_may_be_longer_than_a_windowed_group() -> None:
    kv = make_blocks(full(20), windowed(4, window=8))
    seq = kv.new_sequence()
    assert (kv.num_free(0), kv.num_free(1)) == (20, 4)
    assert kv.num_missing(seq, 0, 60) == (15, 15)
    assert not kv.grow(seq, 0, 60)
    assert kv.num_missing(seq, 0, 60, chunk=4) == (15, 4)
    compute(kv, range(8), seq=seq)
    assert kv.num_missing(seq, 8, 52, chunk=4) == (13, 2)
    compute(kv, range(16), seq=seq, start=8)
    assert kv.num_missing(seq, 16, 44, chunk=4) == (11, 2)
    assert kv.num_missing(seq, 16, 44, chunk=1) == (11, 1)
    assert kv.grow(seq, 16, 8)
    assert kv.num_missing(seq, 16, 44, chunk=1) == (9, 0)


def test_a_hit_needs_of_a_windowed_group_only_what_the_next_query_sees() -> None:
    kv = make_blocks(full(16), windowed(16, window=6, sinks=1))
    tokens = list(range(24))
    kv.release(compute(kv, tokens))
    cached = kv.groups[1].cached
    found = kv.new_sequence()
    assert kv.match(found, NAMESPACE, [*tokens, 0]) == 24
    table = tables_of(found)[1]
    assert [block_id == NULL_BLOCK for block_id in table] == [False] + [True] * 3 + [False] * 2
    kv.check_integrity([found])
    kv.release(found)
    cached.forget(table[4])
    assert kv.match(found, NAMESPACE, [*tokens, 0]) == 16, "24 and 20 would see the lost block"
    kv.release(found)
    cached.forget(table[0])
    assert kv.match(found, NAMESPACE, [*tokens, 0]) == 0, "every hit sees the sinks"


@pytest.mark.parametrize("lost", [1, 2])
def test_a_hit_needs_nothing_between_the_sinks_and_the_window(lost: int) -> None:
    kv = make_blocks(full(16), windowed(16, window=6, sinks=1))
    tokens = list(range(24))
    seq = compute(kv, tokens)
    between = kv.groups[1].cached.find(seq.chain[lost])
    assert between is not None
    kv.release(seq)
    kv.groups[1].cached.forget(between)
    assert kv.match(kv.new_sequence(), NAMESPACE, [*tokens, 0]) == 24


@pytest.mark.parametrize("groups", [[full(8)], [full(8), windowed(8, window=6, sinks=1)]])
def test_what_is_handled_once_for_several_tokens_is_handled_in_time(groups: list[KvGroup]) -> None:
    """The scheduler leaves out `advance` up to `num_tokens_handled`."""
    always, seldom = (make_blocks(*groups) for _ in range(2))
    sequences = [kv.new_sequence() for kv in (always, seldom)]
    tokens = list(range(24))
    for _ in range(2):  # the second time after a release, as after a preemption
        for num_computed in range(1, 25):
            for kv, seq in zip((always, seldom), sequences, strict=True):
                assert kv.grow(seq, num_computed - 1, 1)
                if kv is always or num_computed > seq.num_tokens_handled:
                    kv.advance(seq, NAMESPACE, tokens, num_computed)
            assert tables_of(sequences[0]) == tables_of(sequences[1])
            assert sequences[0].num_published == sequences[1].num_published
        for kv, seq in zip((always, seldom), sequences, strict=True):
            kv.release(seq)
            assert kv.drop_adapter(ADAPTER)


# --- forks ----------------------------------------------------------------------------------------


def test_a_forks_last_block_is_copied_by_whoever_writes_first() -> None:
    kv = make_blocks(full(8))
    parent, child = compute(kv, list(range(6))), kv.new_sequence()
    kv.operations.take()
    assert kv.fork(parent, child, 5)
    shared = tables_of(parent)[0][1]
    assert tables_of(child) == tables_of(parent)
    assert kv.num_missing(child, 5, 1) == (1,)
    assert kv.grow(child, 5, 1)
    assert kv.operations.take() == [CopyBlock(0, shared, tables_of(child)[0][1])]
    assert kv.grow(parent, 6, 1)
    assert kv.operations.take() == []
    assert tables_of(parent)[0][1] == shared != tables_of(child)[0][1]
    kv.check_integrity([parent, child])


def test_a_parent_that_writes_on_leaves_the_shared_block_to_its_fork() -> None:
    kv = make_blocks(full(8))
    parent, child = compute(kv, list(range(6))), kv.new_sequence()
    kv.fork(parent, child, 5)
    kv.operations.take()
    assert kv.grow(parent, 6, 1)
    assert kv.operations.take() == [CopyBlock(0, tables_of(child)[0][1], tables_of(parent)[0][1])]
    assert tables_of(parent)[0][1] != tables_of(child)[0][1]


def test_a_published_block_is_not_overwritten_even_by_its_last_holder() -> None:
    kv = make_blocks(full(2))
    tokens = list(range(8))
    parent, child = compute(kv, tokens), kv.new_sequence()
    kv.fork(parent, child, 7)
    kv.release(parent)
    assert kv.grow(child, 7, 1), "alone, it must not need a third block"
    other = kv.new_sequence()
    assert kv.match(other, NAMESPACE, [*tokens, 0]) == 4
    kv.release(other)
    kv.advance(child, NAMESPACE, tokens, 8)
    assert kv.match(other, NAMESPACE, [*tokens, 0]) == 8


@pytest.mark.parametrize("length", range(1, 24))
@pytest.mark.parametrize("window", [1, 4, 6])
def test_a_finished_prompt_can_be_forked_one_token_back_whatever_its_windows(
    length: int, window: int
) -> None:
    kv = make_blocks(full(16), windowed(16, window))
    parent, child = compute(kv, list(range(length))), kv.new_sequence()
    assert kv.fork(parent, child, length - 1)
    assert kv.grow(child, length - 1, 1)
    kv.check_integrity([parent, child])


def test_a_fork_is_refused_once_windows_have_left_what_it_needs() -> None:
    kv = make_blocks(windowed(16, window=4))
    parent, child = compute(kv, list(range(20))), kv.new_sequence()
    assert not kv.fork(parent, child, 10)
    kv.check_integrity([parent, child])
    assert kv.num_free(0) == 15


# --- swapping -------------------------------------------------------------------------------------


def test_a_swapped_sequence_comes_back_with_its_content() -> None:
    kv = make_blocks(full(3), windowed(3, window=5), caching=False, slots=[3, 3])
    seq = compute(kv, list(range(10)))
    kv.operations.take()
    tables = tables_of(seq)
    assert kv.swap_out(seq, 10)
    (out, out_windowed) = kv.operations.take()
    assert out == SwapOut(0, tuple(tables[0]), (0, 1, 2))
    assert out_windowed == SwapOut(1, tuple(tables[1][1:]), (0, 1)), "what was left stays behind"
    assert (kv.num_free(0), kv.num_free(1), kv.share(seq)) == (3, 3, 0.0)
    assert kv.num_missing(seq, 10, 1) == (3, 2)
    assert kv.grow(seq, 10, 1)
    operations = kv.operations.take()
    assert operations == [
        SwapIn(0, (0, 1, 2), tuple(tables_of(seq)[0])),
        SwapIn(1, (0, 1), tuple(tables_of(seq)[1][1:])),
    ]
    assert not seq.is_swapped
    kv.check_integrity([seq])


def test_without_room_on_the_host_nothing_is_swapped() -> None:
    for kv in (make_blocks(full(4), slots=[1]), make_blocks(full(4))):
        seq = compute(kv, list(range(8)))
        assert not kv.swap_out(seq, 8)
        assert not seq.is_swapped
        kv.check_integrity([seq])
    assert not kv.swap_out(kv.new_sequence(), 0), "nothing computed, nothing to save"


def test_where_windows_have_left_nothing_there_is_nothing_to_swap() -> None:
    kv = make_blocks(windowed(4, window=1), slots=[4])
    kv.release(compute(kv, list(range(2 * SIZE))))
    seq = kv.new_sequence()
    assert kv.match(seq, NAMESPACE, list(range(2 * SIZE + 1))) == 2 * SIZE
    assert not kv.swap_out(seq, 2 * SIZE)


@pytest.mark.parametrize("num_held", [1, 2])
def test_what_is_still_cached_is_not_brought_back_from_the_host(num_held: int) -> None:
    kv = make_blocks(full(4), slots=[4])
    seq = compute(kv, list(range(10)))
    tables = tables_of(seq)[0]
    kv.swap_out(seq, 10)
    kv.operations.take()
    reader = kv.new_sequence()
    assert kv.match(reader, NAMESPACE, range(num_held * SIZE + 1)) == num_held * SIZE
    assert kv.num_missing(seq, 10, 1) == (3 - num_held,), "the reader holds the others already"
    assert kv.grow(seq, 10, 1)
    assert tables_of(seq)[0][:2] == tables[:2]
    assert kv.operations.take() == [SwapIn(0, (2,), (tables_of(seq)[0][2],))]
    kv.check_integrity([seq, reader])


def test_what_is_all_cached_is_not_copied_at_all() -> None:
    kv = make_blocks(full(4), slots=[4])
    seq = compute(kv, list(range(8)))
    table = tables_of(seq)[0]
    kv.swap_out(seq, 8)
    kv.operations.take()
    assert kv.grow(seq, 8, 1)
    assert tables_of(seq)[0][:2] == table
    assert kv.operations.take() == [ZeroBlocks(0, (tables_of(seq)[0][2],))]


def test_a_block_that_was_cleared_for_another_is_filled_afterwards() -> None:
    kv = make_blocks(full(1), caching=False, slots=[1])
    seq, other = compute(kv, [1]), kv.new_sequence()
    kv.swap_out(seq, 1)
    kv.operations.take()
    assert kv.grow(other, 0, 1)
    kv.release(other)
    assert kv.grow(seq, 1, 1)
    assert kv.operations.take() == [ZeroBlocks(0, (1,)), SwapIn(0, (0,), (1,))]


@pytest.mark.parametrize("is_evicted", [False, True])
def test_what_windows_have_left_is_not_published_again(is_evicted: bool) -> None:
    kv = make_blocks(full(4), windowed(4, window=5), slots=[4, 4])
    tokens = list(range(13))
    seq = compute(kv, tokens[:12])
    kv.swap_out(seq, 12)
    if is_evicted:
        other = kv.new_sequence()
        assert kv.grow(other, 0, 16)
        kv.release(other)
    compute(kv, tokens, seq=seq, start=12)
    assert tables_of(seq)[1][0] == NULL_BLOCK
    assert NULL_BLOCK not in kv.groups[1].cached
    assert len(kv.groups[1].cached) == (2 if is_evicted else 3)
    kv.check_integrity([seq])


def test_what_came_back_from_the_host_is_published_again() -> None:
    kv = make_blocks(full(2), slots=[2])
    tokens = list(range(8))
    seq = compute(kv, tokens[:7])
    kv.swap_out(seq, 7)
    other = kv.new_sequence()
    assert kv.grow(other, 0, 8)  # takes the cached block
    kv.release(other)
    assert len(kv.groups[0].cached) == 0
    compute(kv, tokens, seq=seq, start=7)
    assert len(kv.groups[0].cached) == 2


def test_aborting_a_swapped_sequence_gives_its_slots_back() -> None:
    kv = make_blocks(full(2), slots=[2])
    seq = compute(kv, list(range(8)))
    kv.swap_out(seq, 8)
    kv.release(seq)
    kv.check_integrity([])
    assert not seq.is_swapped
