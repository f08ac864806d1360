from __future__ import annotations

import random
from collections import Counter
from itertools import chain

import pytest

from loraplex.engine.kv.block_pool import NULL_BLOCK, BlockPool


def test_never_hands_out_the_null_block_and_gives_all_or_nothing() -> None:
    pool = BlockPool(5)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    blocks = pool.allocate(4)
    assert blocks is not None
    assert sorted(blocks) == [1, 2, 3, 4]
    assert NULL_BLOCK not in blocks
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == pool.count_free({1, 2}) == 0
    pool.free(blocks[:1])
    assert pool.count_free({1, 2}) == pool.num_free == 1
    pool.free(blocks[1:])
    assert pool.num_free == 2


def test_a_free_block_can_be_shared_again_with_its_content() -> None:
    reused: list[int] = []
    pool = BlockPool(3, on_reuse=reused.append)
    blocks = pool.allocate(1)
    assert blocks is not None
    reused.clear()
    pool.free(blocks)
    pool.share(blocks)
    assert reused == []
    assert pool.ref_count(blocks[0]) == 1
    assert pool.num_free == 1


def test_reuses_least_recently_freed_first_and_a_sequences_leaves_before_its_root() -> None:
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(3)
    assert first is not None
    assert second is not None
    pool.free(first)
    pool.free(second)
    assert pool.allocate(6) == [*reversed(first), *reversed(second)]


def test_a_forgotten_free_block_is_reused_next() -> None:
    pool = BlockPool(5)
    pool.forget(4)
    assert pool.allocate(1) == [4]
    pool.forget(4)
    assert pool.allocate(3) == [1, 2, 3], "what is held stays"


def test_freeing_what_nobody_holds_is_an_error() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="has no holder"):
        pool.free([1])


def test_counts_agree_after_any_walk() -> None:
    rng = random.Random(0)
    pool = BlockPool(20)
    held: list[list[int]] = []
    for _ in range(5000):
        action = rng.random()
        if action < 0.4 and (blocks := pool.allocate(rng.randint(0, 6))) is not None:
            held.append(blocks)
        elif action < 0.6 and held:
            pool.share(shared := rng.choice(held))
            held.append(list(shared))
        elif held:
            pool.free(held.pop(rng.randrange(len(held))))
        pool.check_integrity()
        holders = Counter(chain.from_iterable(held))
        assert all(pool.ref_count(block_id) == holders[block_id] for block_id in range(1, 20))


def test_withdrawn_blocks_are_out_of_use_until_they_are_restored() -> None:
    reused: list[int] = []
    pool = BlockPool(6, on_reuse=reused.append)
    held = pool.allocate(2)
    assert held == [1, 2]
    reused.clear()
    assert pool.withdraw(2) == [3, 4]
    assert reused == [3, 4]  # their content is gone
    assert (pool.num_usable, pool.num_free, pool.num_withdrawn) == (3, 1, 2)
    pool.check_integrity()
    assert pool.allocate(2) is None
    assert pool.restore(1) == [4]
    assert pool.num_usable == 4
    assert pool.allocate(1) == [4]
    pool.check_integrity()


def test_what_the_last_blocks_hold_moves_to_those_that_would_be_reused_first() -> None:
    reused: list[int] = []
    pool = BlockPool(9, on_reuse=reused.append)
    held = pool.allocate(8)
    assert held == [1, 2, 3, 4, 5, 6, 7, 8]
    pool.share([7])
    pool.free([4])
    pool.free([8])
    pool.free([2])
    reused.clear()
    assert pool.withdraw_last(2) == ([8, 7], {7: 4})
    assert reused == [4, 8]
    assert (pool.num_usable, pool.num_free, pool.next_free) == (6, 1, 2)
    assert [pool.ref_count(block_id) for block_id in (4, 7, 8)] == [2, 0, 0]
    pool.check_integrity()
    pool.restore(1)
    assert pool.allocate(1) == [7]  # the one beside the others
    pool.free([4, 7])
    pool.check_integrity()


def test_a_free_block_that_moves_keeps_its_turn() -> None:
    pool = BlockPool(7)
    assert pool.allocate(6) == [1, 2, 3, 4, 5, 6]
    for block_id in (2, 6, 4, 1):
        pool.free([block_id])
    assert pool.withdraw_last(1) == ([6], {6: 2})
    assert pool.allocate(3) == [2, 4, 1]


def test_a_block_that_moves_has_been_held_for_as_long_as_before() -> None:
    clock = ManualClock()
    pool = BlockPool(5, clock=clock)
    assert pool.allocate(4) == [1, 2, 3, 4]
    clock.now += 6.0
    pool.free([2])
    assert pool.withdraw_last(1) == ([4], {4: 2})
    clock.now += 1.0
    assert pool.free([2]) == 7.0


class ManualClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_blocks_seconds_are_divided_among_its_holders_of_each_moment() -> None:
    clock = ManualClock()
    pool = BlockPool(3, clock=clock)
    blocks = pool.allocate(1)
    assert blocks is not None
    (block,) = blocks
    clock.now += 6.0  # held by the first alone
    second = -pool.share([block])
    clock.now += 8.0  # by both
    first = pool.free([block])
    clock.now += 1.0
    second += pool.free([block])
    assert (first, second) == (6.0 + 4.0, 4.0 + 1.0)
    clock.now += 50.0  # by nobody, while its content is cached
    third = -pool.share([block])
    clock.now += 2.0
    third += pool.free([block])
    assert third == 2.0
    pool.forget(block)
    assert pool.allocate(1) == [block]
    assert pool.free([block]) == 0.0, "its content is another, and no time has passed"


def test_what_all_holders_are_told_is_what_all_blocks_were_held_for() -> None:
    rng, clock = random.Random(5), ManualClock()
    pool = BlockPool(20, clock=clock)
    holders: list[tuple[list[int], float]] = []
    told = spent = 0.0
    for _ in range(2_000):
        seconds = rng.random()
        spent += seconds * (pool.num_usable - pool.num_free)
        clock.now += seconds
        move = rng.randrange(3)
        if move == 0 and (new := pool.allocate(rng.randrange(1, 5))):
            holders.append((new, 0.0))
        elif move == 1 and holders:
            blocks = rng.choice(holders)[0]
            holders.append((blocks, -pool.share(blocks)))
        elif move == 2 and holders:
            blocks, noted = holders.pop(rng.randrange(len(holders)))
            told += noted + pool.free(blocks)
    told += sum(noted + pool.free(blocks) for blocks, noted in holders)
    assert told == pytest.approx(spent)
