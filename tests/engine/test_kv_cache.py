"""The tensors of the KV blocks: the effect of operations, and the quantization error."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.engine.config import KvDtype
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.kv.block_memory import BlockMemory
from loraplex.engine.kv.cache import KvCache, KvFormat, choose_kv_format, kv_bytes_per_block
from loraplex.engine.kv.groups import LayerKvShape, group_layers, one_group
from loraplex.engine.kv.layout import (
    CopyBlock,
    GiveBackBlocks,
    KvGroup,
    KvOperation,
    RestoreBlocks,
    SwapIn,
    SwapOut,
    ZeroBlocks,
)
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.kernels.attention_window import AttentionWindow
from loraplex.kernels.kv_pages import GatherBuffer, KvPages, make_pages

CPU = torch.device("cpu")
BLOCK = 4
SHAPES = [
    LayerKvShape(2, 6, 4),
    LayerKvShape(1, 8, 8, window=AttentionWindow(8)),
    LayerKvShape(2, 6, 4),
]
GROUPS = (
    KvGroup((0, 2), None, 0, num_blocks=6),
    KvGroup((1,), AttentionWindow(8), 0, num_blocks=5),
)
FORMATS = [KvFormat(torch.float32), KvFormat(torch.bfloat16), KvFormat(torch.float32, torch.int8)]


Groups = tuple[KvGroup, ...]
DIVIDED: Groups = (replace(GROUPS[0], num_less=3, gives_end=True), GROUPS[1])
"""The blocks of the first group are in a memory that others have a part of."""


@pytest.fixture(params=[GROUPS, DIVIDED], ids=["own", "divided"])
def groups(request: pytest.FixtureRequest) -> Groups:
    value: Groups = request.param
    return value


def make_cache(
    kv_format: KvFormat = FORMATS[0],
    num_swap_slots: tuple[int, ...] = (),
    *,
    groups: Groups = GROUPS,
) -> KvCache:
    return KvCache(
        groups,
        SHAPES,
        block_size=BLOCK,
        kv_format=kv_format,
        device=CPU,
        num_swap_slots=num_swap_slots,
        block_memory=make_memory(kv_format) if groups[0].gives_end else None,
    )


def make_memory(kv_format: KvFormat) -> BlockMemory:
    """With a block more than the cache has."""
    size = kv_bytes_per_block(DIVIDED[0], SHAPES, block_size=BLOCK, kv_format=kv_format)
    return BlockMemory(torch.zeros(7 * size, dtype=torch.uint8), size)


def fill(cache: KvCache, seed: int = 0) -> None:
    """Write something different into every slot but those of the null blocks."""
    generator = torch.Generator().manual_seed(seed)
    for group in cache.groups:
        slots = torch.arange(BLOCK, group.num_blocks * BLOCK)
        for layer in group.layers:
            for pages in (cache.keys[layer], cache.values[layer]):
                size = (len(slots), pages.num_heads, pages.dim)
                pages.write(slots, torch.randn(size, generator=generator).to(kv_dtype(pages)))


def kv_dtype(pages: KvPages) -> torch.dtype:
    return pages.gather(torch.tensor([0])).dtype


@pytest.mark.parametrize("kv_format", FORMATS, ids=["fp32", "bf16", "int8"])
def test_blocks_on_the_cpu_take_memory_once_they_are_written(kv_format: KvFormat) -> None:
    before = resident_bytes()
    cache = KvCache(
        one_group(1, 40_000),
        [LayerKvShape(8, 64, 64)],
        block_size=16,
        kv_format=kv_format,
        device=CPU,
    )
    planned = sum(
        tensor.nbytes
        for pages in (*cache.keys.values(), *cache.values.values())
        for tensor in pages.tensors
    )
    assert planned > 500 << 20
    # Tensors below 32 MiB, like the scales, may lie in memory that this process has used before.
    assert resident_bytes() - before < planned // 10
    assert not cache.keys[0].gather(torch.tensor([0, 39_999])).any()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def content(cache: KvCache, group: int) -> list[list[float]]:
    """Per block of the group all that its layers hold in it."""
    ids = torch.arange(cache.groups[group].num_blocks)
    parts = [
        pages.gather(ids).flatten(1)
        for layer in cache.groups[group].layers
        for pages in (cache.keys[layer], cache.values[layer])
    ]
    rows: list[list[float]] = torch.cat(parts, 1).float().tolist()
    return rows


@pytest.mark.parametrize("kv_format", FORMATS, ids=["fp32", "bf16", "int8"])
def test_operations_are_executed_in_the_order_in_which_they_were_written(
    kv_format: KvFormat, groups: Groups
) -> None:
    cache = make_cache(kv_format, num_swap_slots=(2, 0), groups=groups)
    fill(cache)
    before, other = content(cache, 0), content(cache, 1)
    cache.execute(
        [
            CopyBlock(0, 1, 2),  # the source is cleared for a new owner in the same step
            ZeroBlocks(0, (1,)),
            SwapOut(0, (3, 4), (1, 0)),
            ZeroBlocks(0, (3, 4)),
            CopyBlock(0, 2, 4),
            SwapIn(0, (0,), (5,)),
        ]
    )
    empty = before[0]
    assert not any(empty)
    after = content(cache, 0)
    assert after == [empty, empty, before[1], empty, before[1], before[4]]
    assert content(cache, 1) == other, "another group's blocks are not touched"
    cache.execute([SwapIn(0, (1, 0), (1, 3))])
    assert content(cache, 0)[1:4] == [before[3], before[1], before[4]]


def test_clearing_a_block_leaves_nothing_that_was_not_finite(groups: Groups) -> None:
    for kv_format in FORMATS:
        cache = make_cache(kv_format, groups=groups)
        for layer in range(len(SHAPES)):
            pages = cache.keys[layer]
            size = (2, pages.num_heads, pages.dim)
            bad = torch.full(size, torch.nan, dtype=kv_dtype(pages))
            pages.write(torch.tensor([5, 9]), bad)
            assert pages.gather(torch.tensor([1, 2])).isnan().any(-1).sum() == 2 * pages.num_heads
        cache.execute([ZeroBlocks(group, (1, 2, 1)) for group in (0, 1)])
        assert not any(any(block) for group in (0, 1) for block in content(cache, group))


def slot_contents(cache: KvCache, group: int, table: list[int], length: int) -> list[list[float]]:
    """What the group's layers hold at each position of the sequence with these blocks."""
    rows = torch.cat(
        [
            pages.gather(torch.tensor(table)).flatten(0, 1).flatten(1)[:length].float()
            for layer in cache.groups[group].layers
            for pages in (cache.keys[layer], cache.values[layer])
        ],
        1,
    )
    values: list[list[float]] = rows.tolist()
    return values


@pytest.mark.parametrize("kv_format", FORMATS, ids=["fp32", "bf16", "int8"])
def test_positions_move_at_once_across_blocks_and_in_every_layer(
    kv_format: KvFormat, groups: Groups
) -> None:
    cache = make_cache(kv_format, groups=groups)
    fill(cache)
    tables, length = [[3, 1, 5], [2, 4, 1]], 11
    before = [slot_contents(cache, group, tables[group], length) for group in (0, 1)]
    # 5 is read for 4 and written from 8.
    cache.move(list(map(block_table, tables)), sources=(5, 8, 10), targets=(4, 5, 6))
    for group in (0, 1):
        expected = list(before[group])
        expected[4:7] = [before[group][position] for position in (5, 8, 10)]
        assert slot_contents(cache, group, tables[group], length) == expected


@pytest.mark.parametrize("kv_format", FORMATS, ids=["fp32", "bf16", "int8"])
def test_blocks_in_a_divided_memory_touch_no_other_bytes(kv_format: KvFormat) -> None:
    size = kv_bytes_per_block(DIVIDED[0], SHAPES, block_size=BLOCK, kv_format=kv_format)
    memory = torch.full((7 * size,), 99, dtype=torch.uint8)
    cache = KvCache(
        DIVIDED,
        SHAPES,
        block_size=BLOCK,
        kv_format=kv_format,
        device=CPU,
        block_memory=BlockMemory(memory, size),
        has_spare_blocks=True,
    )
    assert cache.spare_blocks == [6, 5]
    assert cache.block_bytes[0] == size
    blocks = memory.view(7, size)
    cache.execute([ZeroBlocks(0, (1, 2, 3))])
    assert [block.unique().tolist() for block in blocks] == [[99], [0], [0], [0], [99], [99], [99]]
    fill(cache)
    assert [int((block != 99).sum()) > 0 for block in blocks] == [False, *[True] * 5, False]
    third = blocks[3].clone()
    cache.execute([CopyBlock(0, 3, 2), GiveBackBlocks(0, (5, 3, 4))])
    assert torch.equal(blocks[2], third)
    assert not blocks[3:6].any()
    assert (blocks[[0, 6]] == 99).all()


def test_a_cache_is_as_large_as_its_blocks_that_are_not_given_back() -> None:
    cache = make_cache(groups=DIVIDED)
    whole = cache.num_bytes
    cache.execute([GiveBackBlocks(0, (5, 4)), RestoreBlocks(0, (4,))])
    assert cache.num_usable(0) == DIVIDED[0].num_usable - 1
    assert cache.num_bytes == whole - cache.block_bytes[0]
    assert cache.num_given_back == 2


def test_random_operations_do_what_they_do_to_a_list(groups: Groups) -> None:
    rng = random.Random(0)
    cache = make_cache(num_swap_slots=(4, 3), groups=groups)
    fill(cache)
    device = [content(cache, group) for group in (0, 1)]
    empty = [device[group][0] for group in (0, 1)]
    host: list[dict[int, list[float]]] = [{}, {}]
    log: list[KvOperation] = []
    for _ in range(300):
        group = rng.randrange(2)
        ids = rng.sample(range(1, GROUPS[group].num_blocks), 2)
        slots = rng.sample(range((4, 3)[group]), 2)
        kind = rng.choice("zcoi")
        if kind == "z":
            log.append(ZeroBlocks(group, tuple(ids)))
            device[group][ids[0]] = device[group][ids[1]] = empty[group]
        elif kind == "c":
            log.append(CopyBlock(group, *ids))
            device[group][ids[1]] = device[group][ids[0]]
        elif kind == "o":
            log.append(SwapOut(group, tuple(ids), tuple(slots)))
            host[group].update(zip(slots, (device[group][i] for i in ids), strict=True))
        elif all(slot in host[group] for slot in slots):
            log.append(SwapIn(group, tuple(slots), tuple(ids)))
            for slot, block in zip(slots, ids, strict=True):
                device[group][block] = host[group][slot]
    cache.execute(log)
    assert [content(cache, group) for group in (0, 1)] == device


@pytest.mark.parametrize("code_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 300.0, 1e30])
def test_a_code_is_at_most_half_a_step_from_its_element(
    code_dtype: torch.dtype, size: float
) -> None:
    pages = make_pages((9, BLOCK, 3, 16), dtype=torch.float32, code_dtype=code_dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(32, 3, 16, generator=generator) * size
    vectors[3, 1] = 0.0
    pages.write(torch.arange(BLOCK, BLOCK + 32), vectors)
    error = (pages.gather(torch.arange(1, 9)).flatten(0, 1) - vectors).abs()
    largest = vectors.abs().amax(-1, keepdim=True)
    if code_dtype is torch.int8:
        bound = largest / 254
    else:
        bound = torch.maximum(vectors.abs() / 16, largest / 448 * 2**-10)
    # The scale is rounded to eight bits, so a step may be 1/256 longer.
    assert (error <= bound * (1 + 1 / 128)).all()
    assert error[3, 1].eq(0).all()
    assert pages.gather(torch.tensor([0])).eq(0).all(), "the null block stays empty"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_reads_as_not_finite(bad: float) -> None:
    pages = make_pages((3, BLOCK, 2, 8), dtype=torch.float32, code_dtype=torch.int8, device=CPU)
    vectors = torch.ones(2, 2, 8)
    vectors[1, 0, 5] = bad
    pages.write(torch.tensor([4, 5]), vectors)
    read = pages.gather(torch.tensor([1]))[0]
    assert read[0].isfinite().all()
    assert read[1, 1].isfinite().all()
    assert not read[1, 0].isfinite().any()


@pytest.mark.parametrize("kv_format", FORMATS, ids=["fp32", "bf16", "int8"])
def test_blocks_gathered_to_reused_memory_are_those_gathered_to_fresh(kv_format: KvFormat) -> None:
    cache, buffer = make_cache(kv_format), GatherBuffer()
    fill(cache)
    for layer, ids in ((0, [3]), (1, [4, 1, 2, 4]), (2, [5, 0])):
        for pages in (cache.keys[layer], cache.values[layer]):
            for table in (torch.tensor(ids), torch.tensor([ids, ids])):
                assert torch.equal(pages.gather(table, buffer), pages.gather(table))


def test_int8_takes_little_more_than_half_of_bf16() -> None:
    shapes = [LayerKvShape(8, 128, 128)] * 4
    (group,) = group_layers(shapes, max_model_len=1024)
    plain, int8 = (
        kv_bytes_per_block(
            group, shapes, block_size=16, kv_format=KvFormat(torch.bfloat16, code_dtype)
        )
        for code_dtype in (None, torch.int8)
    )
    assert plain == 4 * 16 * 8 * 256 * 2
    assert int8 == 4 * 16 * 8 * 2 * (128 + 2)


def test_bytes_per_block_is_what_the_tensors_take() -> None:
    for kv_format in FORMATS:
        cache = make_cache(kv_format)
        for group in GROUPS:
            taken = sum(
                tensor.nbytes
                for layer in group.layers
                for pages in (cache.keys[layer], cache.values[layer])
                for tensor in pages.tensors
            )
            size = kv_bytes_per_block(group, SHAPES, block_size=BLOCK, kv_format=kv_format)
            assert taken == size * group.num_blocks


def test_fp8_is_refused_by_name_where_it_is_not_computed() -> None:
    with pytest.raises(UnsupportedModel, match="fp8"):
        choose_kv_format(KvDtype.FP8, dtype=torch.float32, device=CPU)


def test_layers_are_grouped_by_how_far_back_they_see() -> None:
    near, chunk = AttentionWindow(8), AttentionWindow(8, is_chunked=True)
    shapes = [
        LayerKvShape(1, 4, 4, window)
        for window in (near, None, near, AttentionWindow(4096), None, chunk)
    ]
    groups = group_layers(shapes, max_model_len=1024)
    assert [(group.layers, group.window, group.sinks) for group in groups] == [
        ((1, 3, 4), None, 0),  # nothing outgrows a window of 4096
        ((0, 2), near, 0),
        ((5,), chunk, 0),
    ]
    limited = group_layers(shapes, max_model_len=1024, attention_window=100, attention_sinks=4)
    assert [(group.layers, group.window, group.sinks) for group in limited] == [
        ((0, 2), near, 0),
        ((1, 3, 4), AttentionWindow(100), 4),
        ((5,), chunk, 0),
    ]
    assert groups == group_layers(
        shapes, max_model_len=1024, attention_window=1024, attention_sinks=4
    ), "nothing outgrows such a window either"
