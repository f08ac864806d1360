"""Blocks are verified, scaled once in fp32, bounded in bytes and zeroed when they are dropped."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.block import BlockPlan, Extra, ExtraKind, write_block_header
from loraplex.adapters.block_reader import PIECE_ELEMENTS
from loraplex.adapters.errors import AdapterUnavailable, ArenaTooSmall, ObjectCorrupt
from loraplex.adapters.host_cache import HostBlock, HostCache
from loraplex.adapters.layout import BaseLayout, Projection, Slice
from support.blocks import DTYPES, StoredBlock, make_key, make_layout, write_block

LARGE_LAYOUT = BaseLayout("base", (Projection((Slice("q", 700, 900), Slice("k", 700, 300))),))
"""At rank 100 every matrix takes several pieces."""


def make_cache(capacity_bytes: int = 1 << 20, dtype: torch.dtype = torch.float32) -> HostCache:
    return HostCache(make_layout(), capacity_bytes, dtype)


def read(cache: HostCache, stored: StoredBlock) -> HostBlock:
    block = cache.read(stored.key, stored.path)
    assert block is not None
    return block


def assert_folded(block: HostBlock, stored: StoredBlock) -> None:
    """A is the file's, B is fp32(scale × B), each rounded once."""
    for index, rank in stored.plan.ranks.items():
        part = stored.plan.layout.slices[index]
        a_offset, b_offset, table_rank = block.table[index].tolist()
        assert table_rank == rank
        a, b = stored.matrices(index)
        dtype = block.tensor.dtype
        scaled = b.float().numpy() * np.float32(stored.scales[index])
        expected_a, expected_b = a.float().to(dtype), torch.from_numpy(scaled).to(dtype)
        assert torch.equal(
            block.tensor[a_offset : a_offset + rank * part.in_features], expected_a.flatten()
        )
        assert torch.equal(
            block.tensor[b_offset : b_offset + rank * part.out_features], expected_b.flatten()
        )


@pytest.mark.parametrize("serving", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored_as", list(DTYPES))
def test_folds_the_scale_into_b_in_fp32_and_rounds_once(
    tmp_path: Path, stored_as: str, serving: torch.dtype
) -> None:
    stored = write_block(tmp_path / "block", make_key("a"), dtype=stored_as)
    block = read(make_cache(dtype=serving), stored)
    assert block.tensor.dtype == serving
    assert block.num_elements == stored.plan.num_elements
    assert_folded(block, stored)


def test_a_block_without_extras_is_not_prepared(tmp_path: Path) -> None:
    prepared: list[object] = []
    cache = HostCache(
        make_layout(), 1 << 20, torch.float32, prepare=lambda *block: prepared.append(block)
    )
    stored = write_block(tmp_path / "block", make_key("a"))
    assert_folded(read(cache, stored), stored)
    assert prepared == []


def test_matrices_larger_than_a_piece_are_read_whole(tmp_path: Path) -> None:
    stored = write_block(
        tmp_path / "block", make_key("a"), layout=LARGE_LAYOUT, ranks={0: 100, 1: 99}, dtype="BF16"
    )
    assert stored.plan.num_elements > 5 * PIECE_ELEMENTS
    cache = HostCache(LARGE_LAYOUT, 1 << 20, torch.bfloat16)
    assert_folded(read(cache, stored), stored)


def truncate(stored: StoredBlock) -> None:
    content = stored.path.read_bytes()
    stored.path.write_bytes(content[:-1])


def lengthen(stored: StoredBlock) -> None:
    content = stored.path.read_bytes()
    stored.path.write_bytes(content + b"\0")


def scramble_magic(stored: StoredBlock) -> None:
    content = stored.path.read_bytes()
    stored.path.write_bytes(b"X" + content[1:])


def rewrite_header(stored: StoredBlock, **changes: object) -> None:
    fields = {
        "base_id": "base",
        "digest": stored.key.digest,
        "dtype": "F32",
        "scales": stored.scales,
        "plan": stored.plan,
        **changes,
    }
    with stored.path.open("wb") as file:
        write_block_header(file, **fields)  # type: ignore[arg-type]
        file.write(bytes(4 * fields["plan"].num_elements))  # type: ignore[attr-defined]


def name_another_adapter(stored: StoredBlock) -> None:
    rewrite_header(stored, digest="sha256:other")


def name_another_base(stored: StoredBlock) -> None:
    rewrite_header(stored, base_id="other")


def make_scale_infinite(stored: StoredBlock) -> None:
    rewrite_header(stored, scales={**stored.scales, 0: float("inf")})


def touch_no_slice(stored: StoredBlock) -> None:
    rewrite_header(stored, plan=BlockPlan(make_layout(), {}))


def touch_a_slice_that_does_not_exist(stored: StoredBlock) -> None:
    larger = (*make_layout().projections, Projection((Slice("extra", 4, 4),)))
    plan = BlockPlan(BaseLayout("base", larger), {0: 3, 6: 3})
    rewrite_header(stored, plan=plan, scales={0: 1.0, 6: 1.0})


def touch_a_slice_that_takes_no_room(stored: StoredBlock) -> None:
    plan = BlockPlan(make_layout(), {0: 3, 6: 3})
    rewrite_header(stored, plan=plan, scales={0: 1.0, 6: 1.0})


def extend_a_slice_that_does_not_exist(stored: StoredBlock) -> None:
    extra = Extra(6, ExtraKind.BIAS, (4,))
    rewrite_header(stored, plan=BlockPlan(make_layout(), stored.plan.ranks, (extra,)))


def take_sizes_from_another_layout(stored: StoredBlock) -> None:
    other = BaseLayout("base", (Projection((Slice("q", 128, 128),)),))
    rewrite_header(stored, plan=BlockPlan(other, {0: 3}), scales={0: 1.0})


def count_rows_of_factors_wrongly(stored: StoredBlock) -> None:
    rewrite_header(stored, row_scales={0: ((1, 1.0), (1, 2.0))})


@pytest.mark.parametrize(
    "spoil",
    [
        count_rows_of_factors_wrongly,
        truncate,
        lengthen,
        scramble_magic,
        name_another_adapter,
        name_another_base,
        make_scale_infinite,
        touch_no_slice,
        touch_a_slice_that_does_not_exist,
        touch_a_slice_that_takes_no_room,
        extend_a_slice_that_does_not_exist,
        take_sizes_from_another_layout,
    ],
)
def test_refuses_what_is_not_the_block_of_this_adapter_and_base(
    tmp_path: Path, spoil: Callable[[StoredBlock], None]
) -> None:
    stored = write_block(tmp_path / "block", make_key("a"))
    spoil(stored)
    cache = make_cache()
    with pytest.raises(ObjectCorrupt):
        cache.read(stored.key, stored.path)
    assert cache.used_bytes == 0
    assert not cache.holds(stored.key)


def test_refuses_values_that_overflow_the_serving_type_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    stored = write_block(tmp_path / "block", make_key("a"), scale=1e6)
    cache = make_cache(dtype=torch.float16)
    with pytest.raises(AdapterUnavailable, match="not finite"):
        cache.read(stored.key, stored.path)
    assert cache.used_bytes == 0
    replacement = write_block(tmp_path / "other", make_key("b"))
    assert_folded(read(cache, replacement), replacement)


def test_drops_the_least_recently_used_block_that_is_not_in_use(tmp_path: Path) -> None:
    stored = [write_block(tmp_path / name, make_key(name)) for name in "abcd"]
    num_bytes = 4 * stored[0].plan.num_elements
    cache = make_cache(3 * num_bytes)
    for block in stored[:3]:
        read(cache, block)
    for block in stored[1:3]:
        cache.release(block.key)
    assert cache.acquire(stored[1].key) is not None
    cache.release(stored[1].key)

    read(cache, stored[3])  # a is in use, b was used after c

    assert set(cache.keys()) == {stored[index].key for index in (0, 1, 3)}
    assert cache.acquire(stored[2].key) is None
    assert cache.used_bytes == cache.capacity_bytes == 3 * num_bytes


def test_a_tenant_beyond_its_share_gives_way_first(tmp_path: Path) -> None:
    mine = write_block(tmp_path / "mine", make_key("mine", "me"))
    size = 4 * mine.plan.num_elements
    cache = make_cache(4 * size)
    read(cache, mine)
    cache.release(mine.key)
    for index in range(10):
        stored = write_block(tmp_path / str(index), make_key(str(index), "parade"))
        read(cache, stored)
        cache.release(stored.key)
    assert cache.keys() == [mine.key, *(make_key(str(i), "parade") for i in (7, 8, 9))]
    assert cache.size_of(mine.key) == size
    assert cache.size_of(make_key("unknown")) == 0
    block = cache.acquire(mine.key)
    assert block is not None
    assert_folded(block, mine)


def test_has_no_room_while_everything_is_in_use(tmp_path: Path) -> None:
    first, second = (write_block(tmp_path / name, make_key(name)) for name in "ab")
    cache = make_cache(4 * first.plan.num_elements)
    read(cache, first)
    assert cache.read(second.key, second.path) is None
    assert cache.holds(first.key)
    cache.release(first.key)
    assert cache.acquire(first.key) is not None
    assert cache.read(second.key, second.path) is None, "it was taken into use again"
    cache.release(first.key)
    assert_folded(read(cache, second), second)
    assert cache.keys() == [second.key]


def test_refuses_a_block_larger_than_the_whole_cache(tmp_path: Path) -> None:
    stored = write_block(tmp_path / "block", make_key("a"))
    needed = 4 * stored.plan.num_elements
    with pytest.raises(ArenaTooSmall, match=f"needs {needed} bytes") as refusal:
        (cache := make_cache(needed - 1)).read(stored.key, stored.path)
    assert str(cache.capacity_bytes) not in str(refusal.value), "that is the machine's own"


@pytest.mark.parametrize("how", ["removed", "dropped for another", "failed"])
def test_bytes_are_zero_when_they_are_free_again(tmp_path: Path, how: str) -> None:
    stored = write_block(tmp_path / "block", make_key("a"))
    cache = make_cache(4 * stored.plan.num_elements)
    block = read(cache, stored)
    assert block.tensor.any()
    cache.release(stored.key)
    if how == "removed":
        cache.remove(stored.key)
    else:
        other = write_block(tmp_path / "other", make_key("b"), ranks={5: 1})
        if how == "failed":
            rewrite_header(other, scales={5: 0.0})
            content = bytearray(other.path.read_bytes())
            first_of_b = -4 * (other.plan.num_elements - int(other.plan.table[5, 1]))
            content[first_of_b : first_of_b + 4] = np.array([np.nan], dtype=np.float32).tobytes()
            other.path.write_bytes(content)
            with pytest.raises(AdapterUnavailable):
                cache.read(other.key, other.path)
        else:
            read(cache, other)
            cache.remove(other.key)
    assert not block.tensor.any()
    assert cache.used_bytes == 0
    assert not cache.holds(stored.key)


def test_removing_an_unknown_adapter_changes_nothing(tmp_path: Path) -> None:
    cache = make_cache()
    stored = write_block(tmp_path / "block", make_key("a"))
    read(cache, stored)
    cache.remove(make_key("b"))
    cache.release(make_key("b"))
    assert cache.keys() == [stored.key]


def test_equal_content_of_two_tenants_is_held_twice(tmp_path: Path) -> None:
    first = write_block(tmp_path / "a", make_key("same", "one"))
    second = write_block(tmp_path / "b", make_key("same", "two"))
    cache = make_cache()
    blocks = read(cache, first), read(cache, second)
    cache.remove(first.key)
    assert not blocks[0].tensor.any()
    assert_folded(blocks[1], second)


def test_many_threads_read_and_drop_at_once_without_mixing_blocks(tmp_path: Path) -> None:
    stored = [
        write_block(tmp_path / str(seed), make_key(str(seed)), ranks={0: 1 + seed % 4}, seed=seed)
        for seed in range(24)
    ]
    # Half of what there is, and room for a largest block whatever the three other threads hold
    # and however they lie: (8 - 3) / 4 > 1.
    cache = make_cache(4 * 8 * max(block.plan.num_elements for block in stored))

    def visit(block: StoredBlock) -> None:
        for _ in range(20):
            cached = cache.acquire(block.key) or cache.read(block.key, block.path)
            assert cached is not None
            assert_folded(cached, block)
            cache.release(block.key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(visit, stored))
    assert cache.used_bytes <= cache.capacity_bytes
