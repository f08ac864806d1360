"""Blocks that are open until their tokens are final: slots, tensors, and their share of memory."""

from __future__ import annotations

import pytest
import torch

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.errors import InsufficientMemory
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.cache import KvCache, KvFormat, kv_bytes_per_block, open_bytes_per_slot
from loraplex.engine.kv.groups import LayerKvShape, one_group
from loraplex.engine.kv.layout import CopyBlock, SwapIn, SwapOut, ZeroBlocks
from loraplex.engine.kv.open_slots import OpenSlots, num_open_slots
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.memory.demands import BaseDemand
from loraplex.engine.memory.device_memory import DeviceMemory
from loraplex.engine.memory.kv_budget import MIB, KvDemand
from loraplex.engine.memory.plan import MemoryPlan, plan_memory

CPU = torch.device("cpu")
SIZE = 4
SHAPES = [LayerKvShape(2, 6, 4), LayerKvShape(1, 8, 8)]
NAMESPACE = CacheNamespace("acme", "runtime", None)


def make_cache(num_blocks: int = 6, num_slots: int | None = 3, num_swap_slots: int = 0) -> KvCache:
    return KvCache(
        one_group(2, num_blocks),
        SHAPES,
        block_size=SIZE,
        kv_format=KvFormat(torch.float32, torch.uint8, 4),
        device=CPU,
        num_open_slots=num_slots,
        num_swap_slots=[num_swap_slots],
    )


def write(cache: KvCache, block_id: int, offsets: range, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([block_id * SIZE + offset for offset in offsets])
    for pages in (*cache.keys.values(), *cache.values.values()):
        size = (len(slots), pages.num_heads, pages.dim)
        pages.write(slots, torch.randn(size, generator=generator))


def codes(cache: KvCache, block_id: int) -> torch.Tensor:
    ids = torch.tensor([block_id])
    return torch.cat(
        [pages.gather(ids).flatten() for pages in (*cache.keys.values(), *cache.values.values())]
    )


def as_computed(cache: KvCache, block_id: int) -> torch.Tensor:
    (opened,) = cache._open
    ids = opened.blocks.readable(torch.tensor([block_id]))
    return torch.cat(
        [pages.gather(ids).flatten() for pages in (*cache.keys.values(), *cache.values.values())]
    )


def test_operations_move_both_forms() -> None:
    cache = make_cache(num_swap_slots=2)
    cache.execute([ZeroBlocks(0, (1, 2), (1, 3))])
    write(cache, 1, range(SIZE), seed=1)
    write(cache, 2, range(2), seed=2)
    complete, begun = codes(cache, 1), as_computed(cache, 2)
    assert complete.any()
    assert not codes(cache, 2).any(), "codes come with the last token"
    # Block 1 is complete, and its slot goes to the copy of block 2.
    cache.execute([CopyBlock(0, 2, 4, 1), SwapOut(0, (1,), (0,)), ZeroBlocks(0, (2,), (3,))])
    assert torch.equal(as_computed(cache, 4), begun)
    assert not as_computed(cache, 2).any(), "a block with a new owner is cleared in both forms"
    write(cache, 4, range(2, SIZE), seed=3)
    assert torch.equal(codes(cache, 1), complete), "another block's slot is not its own any more"
    cache.execute([SwapIn(0, (0,), (5,))])
    assert torch.equal(codes(cache, 5), complete)


def test_a_cleared_token_leaves_nothing_in_either_form() -> None:
    cache = make_cache()
    cache.execute([ZeroBlocks(0, (1, 2), (1, 2))])
    write(cache, 1, range(SIZE), seed=1)
    before = as_computed(cache, 1)
    for pages in (*cache.keys.values(), *cache.values.values()):  # draft tokens from position 3 on
        bad = torch.full((2, pages.num_heads, pages.dim), torch.nan)
        pages.write(torch.tensor([SIZE + 3, 2 * SIZE]), bad)
    cache.clear([block_table([1, 2])], 3, 5)
    for block_id in (1, 2):
        assert codes(cache, block_id).isfinite().all()
        assert as_computed(cache, block_id).isfinite().all()
    assert (as_computed(cache, 1) == before).sum() >= 3 * before.numel() // 4


def test_bytes_are_those_of_the_tensors() -> None:
    cache, kv_format = make_cache(), KvFormat(torch.float32, torch.uint8, 4)
    (group,) = cache.groups
    per_block = kv_bytes_per_block(group, SHAPES, block_size=SIZE, kv_format=kv_format)
    per_slot = open_bytes_per_slot(group, SHAPES, block_size=SIZE, kv_format=kv_format)
    assert cache.num_bytes == 6 * per_block + (1 + 3) * per_slot
    assert per_slot == SIZE * 4 * (2 * 10 + 16)
    assert open_bytes_per_slot(group, SHAPES, block_size=SIZE, kv_format=KvFormat(torch.half)) == 0


@pytest.mark.parametrize(("bits", "least"), [(4, 3.5), (2, 6.0)])
def test_long_sequences_take_a_fraction_of_bf16(bits: int, least: float) -> None:
    """32,768 tokens a sequence, heads of 128: allocated bytes, unfinished blocks included."""
    config = EngineConfig("m", kv_dtype=KvDtype(f"int{bits}"))
    size, num_tokens = config.kv_block_size, config.max_num_seqs * 32_768
    slots = num_open_slots(config.max_num_seqs, config.max_num_batched_tokens, size, num_steps=1)
    plain, quantized = (
        KvCache(
            one_group(1, 1 + num_tokens // block_size),
            [LayerKvShape(1, 128, 128)],
            block_size=block_size,
            kv_format=kv_format,
            device=CPU,
            num_open_slots=slots,
        ).num_bytes
        for block_size, kv_format in (
            (16, KvFormat(torch.bfloat16)),
            (size, KvFormat(torch.bfloat16, torch.uint8, bits)),
        )
    )
    assert plain / quantized >= least


def test_a_block_is_open_until_its_tokens_are_final() -> None:
    kv = KvBlocks(one_group(1, 10), SIZE, prefix_secret=b"s" * 32, num_open_slots=4)
    (group,) = kv.groups
    assert group.open is not None
    tokens = list(range(20))
    seq = kv.new_sequence()
    assert kv.grow(seq, 0, 9)
    assert group.open.num_free == 1
    kv.advance(seq, NAMESPACE, tokens, 7)  # of draft tokens, two were rejected
    assert [block in group.open for block in seq.tables[0].tolist()] == [False, True, True]
    kv.shrink(seq, 8)
    assert group.open.num_free == 3
    assert not kv.grow(seq, 7, 14), "five more blocks cannot be open at once"
    assert kv.grow(seq, 7, 13)
    kv.advance(seq, NAMESPACE, tokens, 20)
    assert group.open.num_free == 4
    other = kv.new_sequence()
    assert kv.match(other, NAMESPACE, tokens) == 16, "whole blocks, but not the last token"
    assert kv.grow(other, 16, 3)
    assert group.open.num_free == 3
    kv.release(seq)
    kv.release(other)
    assert group.open.num_free == 4
    kv.check_integrity([])


def test_a_fork_needs_its_first_block_open() -> None:
    kv = KvBlocks(one_group(1, 10), SIZE, prefix_secret=None, num_open_slots=4)
    tokens = list(range(20))
    parent = kv.new_sequence()
    assert kv.grow(parent, 0, 6)
    kv.advance(parent, NAMESPACE, tokens, 6)
    child = kv.new_sequence()
    assert not kv.fork(parent, child, 3), "its block is complete"
    assert kv.fork(parent, child, 5)
    kv.operations.take()
    assert kv.grow(child, 5, 1)
    (copy,) = kv.operations.take()
    assert isinstance(copy, CopyBlock)
    assert copy.open_slot is not None
    assert kv.fork(parent, kv.new_sequence(), 4)
    kv.release(child)


def test_only_complete_blocks_are_swapped_out() -> None:
    groups = one_group(1, 10)
    kv = KvBlocks(groups, SIZE, prefix_secret=None, num_swap_slots=[5], num_open_slots=4)
    seq, tokens = kv.new_sequence(), list(range(20))
    assert kv.grow(seq, 0, 3)
    kv.advance(seq, NAMESPACE, tokens, 3)
    assert not kv.swap_out(seq, 3), "nothing is complete"
    assert kv.grow(seq, 3, 7)
    kv.advance(seq, NAMESPACE, tokens, 10)
    assert kv.swap_out(seq, 10) == 8
    assert kv.num_missing(seq, 8, 3) == (3,)
    assert kv.grow(seq, 8, 3)
    kv.check_integrity([seq])


def test_slots_suffice_for_any_step() -> None:
    """Decodes that begin a block, draft tokens and prompts anywhere: one block each, and those that
    they go on to."""
    for counts in ([2] * 8, [65, 2, 2], [64] * 3, [1] * 8, [129], [66, 66, 66]):
        longest = sum(1 + (63 + count - 1) // 64 for count in counts)
        assert longest <= num_open_slots(len(counts), sum(counts), 64, num_steps=1)


def test_slots_are_given_back() -> None:
    slots = OpenSlots(3)
    assert sorted([*slots.open([7, 9]), *slots.open([4])]) == [1, 2, 3]
    assert slots.close(9)
    assert not slots.close(9)
    assert 9 not in slots
    slots.check_integrity(lambda _: 1)
    with pytest.raises(AssertionError, match="no holder"):
        slots.check_integrity(lambda _: 0)


def plan_for(kv_cache_bytes: int, num_open: int | None) -> MemoryPlan:
    config = EngineConfig("m", kv_dtype=KvDtype.INT4, kv_cache_bytes=kv_cache_bytes)
    (group,) = one_group(2, 2)
    demand = KvDemand(config, group, MIB, 1600, num_open_slots=num_open, bytes_per_open_slot=MIB)
    return plan_memory(config, DeviceMemory(1000 * MIB, False), BaseDemand(0, 0, (demand,)))


def test_open_blocks_are_part_of_the_planned_memory() -> None:
    assert plan_for(100 * MIB, None).num_kv_blocks == 100
    plan = plan_for(100 * MIB, 29)
    assert (plan.num_kv_blocks, plan.num_open_slots) == (70, 29)
    assert any("unfinished KV blocks 29 of 64 tokens" in line for line in plan.lines)
    with pytest.raises(InsufficientMemory, match="unfinished blocks"):
        plan_for(20 * MIB, 29)
