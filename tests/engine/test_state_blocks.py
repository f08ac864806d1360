"""The blocks of a group of states: which a sequence holds, shares, swaps and leaves behind."""

from __future__ import annotations

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.layout import STATE_WINDOW, KvGroup, SwapIn, SwapOut, whole_blocks
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import SequenceBlocks

SIZE = 4
NAMESPACE = CacheNamespace("acme", "runtime", None)
TOKENS = list(range(100, 160))


def make_blocks(num_states: int = 8, *, num_swap_slots: int = 0, caches: bool = True) -> KvBlocks:
    groups = (
        KvGroup((1,), window=None, sinks=0, num_blocks=40),
        KvGroup((0,), STATE_WINDOW, sinks=0, num_blocks=num_states + 1, holds_states=True),
    )
    return KvBlocks(
        groups,
        SIZE,
        prefix_secret=b"s" * 32 if caches else None,
        num_swap_slots=(40, num_swap_slots) if num_swap_slots else (),
    )


def compute(kv: KvBlocks, seq: SequenceBlocks, start: int, *chunks: int) -> int:
    for chunk in chunks:
        assert kv.grow(seq, start, chunk)
        start += chunk
        kv.advance(seq, NAMESPACE, TOKENS, start)
    return start


def states(seq: SequenceBlocks) -> list[int]:
    block_ids: list[int] = seq.tables[1].tolist()
    return block_ids


@pytest.mark.parametrize(
    ("start", "num_tokens", "expected"),
    [(0, 3, 3), (0, 4, 4), (0, 11, 8), (8, 9, 8), (8, 3, 3), (6, 9, 2), (6, 1, 1), (6, 2, 2)],
)
def test_a_step_computes_whole_blocks_or_a_part_of_one(
    start: int, num_tokens: int, expected: int
) -> None:
    assert whole_blocks(start, num_tokens, SIZE) == expected


def test_a_chunk_takes_one_block_whatever_its_length() -> None:
    kv = make_blocks()
    seq = kv.new_sequence()
    compute(kv, seq, 0, 16)
    assert [bool(block) for block in states(seq)] == [False, False, False, True]
    assert kv.num_free(1) == 7
    assert kv.num_missing(seq, 16, 8) == (2, 1)
    kv.check_integrity([seq])


def test_tokens_of_one_block_go_on_in_it_and_the_next_block_is_another() -> None:
    kv = make_blocks()
    seq = kv.new_sequence()
    compute(kv, seq, 0, 4, 1)
    first, second = states(seq)
    assert first != second
    compute(kv, seq, 5, 1)
    assert states(seq) == [0, second], "the block before is left behind"
    compute(kv, seq, 6, 1, 1, 1)
    assert states(seq)[:1] == [0]
    assert kv.num_free(1) == 6
    kv.check_integrity([seq])


def test_no_step_may_compute_tokens_of_an_unfinished_block_and_of_the_next() -> None:
    kv = make_blocks()
    seq = kv.new_sequence()
    compute(kv, seq, 0, 3)
    with pytest.raises(AssertionError, match="unfinished block"):
        kv.grow(seq, 3, 2)


def test_snapshots_of_a_prompt_are_shared_up_to_its_last_full_block() -> None:
    kv = make_blocks()
    seq = kv.new_sequence()
    compute(kv, seq, 0, 8, 8, 3)
    other = kv.new_sequence()
    assert kv.match(other, NAMESPACE, TOKENS[:19]) == 16
    assert [bool(block) for block in states(other)] == [False, False, False, True]
    kv.check_integrity([seq, other])
    compute(kv, other, 16, 3)
    assert states(other)[4] != states(seq)[4], "unfinished blocks are never shared"
    kv.check_integrity([seq, other])


def test_a_prefix_without_its_states_is_no_hit() -> None:
    kv = make_blocks()
    seq = kv.new_sequence()
    compute(kv, seq, 0, 8, 8)
    other = kv.new_sequence()
    assert kv.match(other, NAMESPACE, TOKENS[:15]) == 8, "no step ended after 12 tokens"


def test_what_decoding_fills_is_no_snapshot() -> None:
    kv = make_blocks()
    seq = kv.new_sequence()
    compute(kv, seq, 0, 8, *[1] * 10)
    kv.release(seq)
    other = kv.new_sequence()
    assert kv.match(other, NAMESPACE, TOKENS[:20]) == 8


def test_a_fork_gets_states_only_at_the_end_of_a_block() -> None:
    kv = make_blocks(caches=False)
    parent, child = kv.new_sequence(), kv.new_sequence()
    compute(kv, parent, 0, 8, 1)
    assert not kv.fork(parent, child, 0), "before the first token there are none"
    assert not kv.fork(parent, child, 7), "the parent's states have gone on"
    assert not states(child)
    assert kv.fork(parent, child, 8)
    compute(kv, child, 8, 1)
    assert states(child)[2] != states(parent)[2]
    kv.check_integrity([parent, child])


def test_swapping_moves_the_last_states_alone() -> None:
    kv = make_blocks(num_swap_slots=2, caches=False)
    seq = kv.new_sequence()
    compute(kv, seq, 0, 8, 1)
    current = states(seq)[-1]
    kv.operations.take()
    assert kv.swap_out(seq, 9) == 9
    moved = [each for each in kv.operations.take() if isinstance(each, SwapOut)]
    assert [each.block_ids for each in moved if each.group == 1] == [(current,)]
    kv.check_integrity([seq])
    assert kv.num_missing(seq, 9, 1) == (3, 1)
    compute(kv, seq, 9, 1)
    back = [each for each in kv.operations.take() if isinstance(each, SwapIn) and each.group == 1]
    assert [each.block_ids for each in back] == [(states(seq)[-1],)]
    kv.check_integrity([seq])


def test_the_snapshots_of_a_deleted_adapter_are_dropped() -> None:
    kv = make_blocks()
    key = AdapterKey("acme", "sha256:1")
    of_adapter = CacheNamespace("acme", "runtime", key)
    seq = kv.new_sequence()
    assert kv.grow(seq, 0, 8)
    kv.advance(seq, of_adapter, TOKENS, 8)
    kv.release(seq)
    assert kv.drop_adapter(key) == 3, "two blocks of keys and values, and their states"
    assert kv.match(kv.new_sequence(), of_adapter, TOKENS[:12]) == 0


def test_a_sequence_that_runs_alone_needs_two_blocks() -> None:
    assert make_blocks(2).fits_alone(100, SIZE)
    assert not make_blocks(1).fits_alone(100, SIZE)
    assert make_blocks(1).fits_alone(4, SIZE)
