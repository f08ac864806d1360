"""Rows give the positions of matrices, are never reused with one generation, and are zeroed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraplex.adapters.arena import CUDA_TABLE_BYTES, INITIAL_ROWS, Arena, initial_rows
from loraplex.adapters.block import BlockPlan, Extra, ExtraKind, PlacedExtra
from loraplex.adapters.extents import Extent, Placement
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.identity import AdapterKey
from support.blocks import StoredBlock, make_key, make_layout, write_block

CPU = torch.device("cpu")


def make_arena(capacity_elements: int = 1 << 16, dtype: torch.dtype = torch.float32) -> Arena:
    return Arena(make_layout(), capacity_elements * dtype.itemsize, dtype, CPU)


def make_arena_at_the_end(memory: Tensor, capacity_elements: int) -> Arena:
    num_bytes = capacity_elements * torch.float32.itemsize
    return Arena(make_layout(), num_bytes, torch.float32, CPU, memory=memory)


def load(arena: Arena, stored: StoredBlock) -> Placement:
    host = HostCache(make_layout(), 1 << 20, arena.flat.dtype)
    block = host.read(stored.key, stored.path)
    assert block is not None
    placement = arena.place(stored.key, block.num_elements, block.table)
    assert placement is not None
    arena.copy_into(placement, block)
    arena.publish(placement)
    return placement


def remove(arena: Arena, placement: Placement) -> None:
    arena.retire(placement)
    arena.erase(placement)
    arena.free(placement)


def matrices(arena: Arena, row: int, index: int) -> tuple[Tensor, Tensor]:
    """A and Bᵀ as a kernel finds them: through `flat` and `table` alone."""
    a_offset, b_offset, rank = arena.table[row, index].tolist()
    part = make_layout().slices[index]
    a = arena.flat[a_offset : a_offset + rank * part.in_features].view(rank, -1)
    b = arena.flat[b_offset : b_offset + rank * part.out_features].view(rank, -1)
    return a, b


def test_a_published_row_leads_to_the_adapters_matrices(tmp_path: Path) -> None:
    arena = make_arena()
    load(arena, write_block(tmp_path / "first", make_key("first")))
    stored = write_block(tmp_path / "second", make_key("second"), seed=1)
    placement = load(arena, stored)
    for index in range(len(make_layout().slices)):
        if index not in stored.plan.ranks:
            assert arena.table[placement.row, index].tolist() == [0, 0, 0]
            continue
        a, b = matrices(arena, placement.row, index)
        expected_a, expected_b = stored.matrices(index)
        torch.testing.assert_close(a, expected_a)
        torch.testing.assert_close(b, expected_b * stored.scales[index])


def test_host_rows_equal_device_rows(tmp_path: Path) -> None:
    arena = make_arena()
    placements = [load(arena, write_block(tmp_path / name, make_key(name))) for name in "abc"]
    remove(arena, placements[1])
    assert [list(map(list, row)) for row in arena.row_tables] == arena.table.tolist()


def test_a_row_is_invisible_until_it_is_published(tmp_path: Path) -> None:
    arena = make_arena()
    stored = write_block(tmp_path / "block", make_key("a"))
    placement = arena.place(stored.key, stored.plan.num_elements, stored.plan.table)
    assert placement is not None
    assert arena.published.get(placement.row) is None
    assert not arena.table.any()
    arena.publish(placement)
    assert arena.published.get(placement.row) == (stored.key, placement.generation)
    remove(arena, placement)
    assert arena.published.get(placement.row) is None


@pytest.mark.parametrize("row", [-1, 0, INITIAL_ROWS, 10**6])
def test_a_free_or_unknown_row_stands_for_nothing(row: int) -> None:
    assert make_arena().published.get(row) is None


def test_a_row_is_reused_under_a_new_generation(tmp_path: Path) -> None:
    arena = make_arena()
    stored = write_block(tmp_path / "block", make_key("a"))
    seen = set()
    for _ in range(3):
        placement = load(arena, stored)
        seen.add((placement.row, placement.generation))
        remove(arena, placement)
    assert seen == {(0, 1), (0, 2), (0, 3)}


def test_a_placement_of_an_earlier_generation_cannot_be_published(tmp_path: Path) -> None:
    arena = make_arena()
    stored = write_block(tmp_path / "block", make_key("a"))
    stale = load(arena, stored)
    remove(arena, stale)
    load(arena, stored)
    with pytest.raises(AssertionError):
        arena.publish(stale)


def test_removal_zeroes_the_bytes_and_the_row_and_nothing_else(tmp_path: Path) -> None:
    arena = make_arena()
    going = load(arena, write_block(tmp_path / "a", make_key("a")))
    staying = load(arena, write_block(tmp_path / "b", make_key("b"), seed=1))
    before = arena.flat[staying.extent.offset : staying.extent.end].clone()
    assert arena.flat[going.extent.offset : going.extent.end].any()
    remove(arena, going)
    assert not arena.flat[going.extent.offset : going.extent.end].any()
    assert not arena.table[going.row].any()
    assert torch.equal(arena.flat[staying.extent.offset : staying.extent.end], before)
    assert arena.published.get(staying.row) == (make_key("b"), staying.generation)


def test_who_keeps_copies_hears_of_every_row_that_goes(tmp_path: Path) -> None:
    arena = make_arena()
    gone: list[int] = []
    arena.on_remove.append(gone.append)
    placements = [load(arena, write_block(tmp_path / name, make_key(name))) for name in "ab"]
    remove(arena, placements[1])
    assert gone == [1]


def test_a_retired_row_stands_for_nothing_and_its_room_is_not_free_until_it_is_zeroed(
    tmp_path: Path,
) -> None:
    stored = write_block(tmp_path / "a", make_key("a"))
    size = stored.plan.num_elements
    arena = make_arena(size)
    placement = load(arena, stored)
    arena.retire(placement)
    assert arena.published.get(placement.row) is None
    assert not arena.table.any()
    assert arena.place(stored.key, size, stored.plan.table) is None
    arena.erase(placement)
    assert arena.place(stored.key, size, stored.plan.table) is None
    arena.free(placement)
    again = arena.place(stored.key, size, stored.plan.table)
    assert again is not None
    assert (again.row, again.generation) == (placement.row, placement.generation + 1)


def test_a_moved_adapter_is_found_at_its_new_place_under_a_new_row(tmp_path: Path) -> None:
    arena = make_arena()
    remains = load(arena, write_block(tmp_path / "first", make_key("first"), seed=1))
    stored = write_block(tmp_path / "second", make_key("second"), seed=2)
    extra = PlacedExtra(Extra(2, ExtraKind.BIAS, (6,), ()), 64)
    host = HostCache(make_layout(), 1 << 20, arena.flat.dtype)
    block = host.read(stored.key, stored.path)
    assert block is not None
    source = arena.place(stored.key, block.num_elements, block.table, (extra,))
    assert source is not None
    arena.copy_into(source, block)
    arena.publish(source)

    target = arena.place_again(source.row, avoid=[Extent(0, source.extent.end + 64)])
    assert target is not None
    assert target.extent.offset >= source.extent.end + 64
    arena.copy_between(source, target)
    assert arena.published.get(source.row) == (stored.key, source.generation)
    assert arena.published.get(target.row) is None
    arena.publish(target)
    remove(arena, source)

    assert arena.published.get(source.row) is None
    assert arena.published.get(target.row) == (stored.key, target.generation)
    assert arena.row_auxiliary[target.row][2][0].offset == target.extent.offset + 64
    assert vectors(arena) == {(target.row, 2): [-1, target.extent.offset + 64, -1]}
    for index in stored.plan.ranks:
        a, b = matrices(arena, target.row, index)
        expected_a, expected_b = stored.matrices(index)
        torch.testing.assert_close(a, expected_a)
        torch.testing.assert_close(b, expected_b * stored.scales[index])
    assert not arena.flat[source.extent.offset : source.extent.end].any()
    assert arena.flat[remains.extent.offset : remains.extent.end].any()
    for index in range(len(make_layout().slices)):
        if index not in stored.plan.ranks:
            assert arena.table[target.row, index].tolist() == [0, 0, 0]


def vectors(arena: Arena) -> dict[tuple[int, int], list[int]]:
    """What the device's table holds by row and slice, where an adapter has a vector."""
    table = arena.vectors.tolist()
    return {
        (row, index): offsets
        for row, slices in enumerate(table)
        for index, offsets in enumerate(slices)
        if offsets != [-1, -1, -1]
    }


MAGNITUDE, LORA_BIAS, BIAS = ExtraKind.MAGNITUDE, ExtraKind.LORA_BIAS, ExtraKind.BIAS


def place_extras(arena: Arena, name: str, *extras: Extra) -> Placement:
    plan = BlockPlan(make_layout(), {0: 1, 1: 2}, extras)
    placement = arena.place(make_key(name), plan.num_elements, plan.table, plan.placed_auxiliary)
    assert placement is not None
    return placement


def test_published_vectors_are_in_the_table_in_the_order_of_their_use(tmp_path: Path) -> None:
    arena = make_arena()
    load(arena, write_block(tmp_path / "plain", make_key("plain")))
    extras = [Extra(0, MAGNITUDE, (20,)), Extra(1, LORA_BIAS, (6,)), Extra(1, BIAS, (6,))]
    held = place_extras(arena, "held", *extras)
    assert vectors(arena) == {}, "it is not published"
    arena.publish(held)
    magnitude, lora_bias, bias = (
        held.extent.offset + placed.offset
        for placed in BlockPlan(make_layout(), {0: 1, 1: 2}, tuple(extras)).placed_auxiliary
    )
    row = held.row
    assert vectors(arena) == {(row, 0): [magnitude, -1, -1], (row, 1): [-1, bias, lora_bias]}
    assert arena.replacing_rows == set()


def test_the_next_adapter_of_a_row_has_none_of_its_predecessor_s_vectors(tmp_path: Path) -> None:
    arena = make_arena()
    matrix = Extra(2, ExtraKind.MATRIX, (6, 20))
    first = place_extras(arena, "first", Extra(0, BIAS, (20,)), Extra(1, MAGNITUDE, (6,)), matrix)
    arena.publish(first)
    assert arena.replacing_rows == {first.row}
    remove(arena, first)
    assert vectors(arena) == {}
    assert arena.replacing_rows == set()
    second = place_extras(arena, "second", Extra(1, BIAS, (6,)))
    arena.publish(second)
    assert second.row == first.row
    assert list(vectors(arena)) == [(second.row, 1)]
    remove(arena, second)
    third = load(arena, write_block(tmp_path / "plain", make_key("plain")))
    assert third.row == first.row
    assert vectors(arena) == {}


def test_the_table_of_vectors_grows_with_the_other() -> None:
    arena = make_arena()
    expected = {}
    for number in range(INITIAL_ROWS + 1):
        held = place_extras(arena, str(number), Extra(1, BIAS, (6,)))
        arena.publish(held)
        bias = BlockPlan(make_layout(), {0: 1, 1: 2}, (Extra(1, BIAS, (6,)),)).placed_auxiliary[0]
        expected[held.row, 1] = [-1, held.extent.offset + bias.offset, -1]
    assert arena.vectors.shape == arena.table.shape
    assert len(arena.vectors) == 2 * INITIAL_ROWS
    assert vectors(arena) == expected


def test_there_may_be_no_room_to_move_to(tmp_path: Path) -> None:
    stored = write_block(tmp_path / "a", make_key("a"))
    arena = make_arena(2 * stored.plan.num_elements - 1)
    placement = load(arena, stored)
    assert arena.place_again(placement.row) is None
    assert arena.used_bytes == 4 * placement.extent.size


def test_counts_bytes_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    stored = write_block(tmp_path / "block", make_key("a"))
    size = stored.plan.num_elements
    arena = make_arena(2 * size + 32, dtype=torch.bfloat16)
    assert arena.capacity_bytes == 2 * (2 * size + 32)
    first = arena.place(stored.key, size, stored.plan.table)
    assert first is not None
    assert arena.used_bytes == 2 * size
    assert arena.place(make_key("b"), size, stored.plan.table, avoid=[Extent(size, 64)]) is None
    assert arena.place(make_key("b"), size, stored.plan.table) is not None
    assert arena.place(make_key("c"), size, stored.plan.table) is None
    remove(arena, first)
    assert arena.used_bytes == 2 * size


def test_the_table_grows_and_keeps_its_rows(tmp_path: Path) -> None:
    arena = make_arena()
    stored = [
        write_block(tmp_path / str(seed), make_key(str(seed)), ranks={5: 1}, seed=seed)
        for seed in range(2 * INITIAL_ROWS + 1)
    ]
    placements = [load(arena, block) for block in stored]
    assert len(arena.table) == len(arena.row_tables) == 4 * INITIAL_ROWS
    for block, placement in zip(stored, placements, strict=True):
        assert arena.published.get(placement.row) == (block.key, placement.generation)
        a, _ = matrices(arena, placement.row, 5)
        torch.testing.assert_close(a, block.matrices(5)[0])


def test_a_table_that_graphs_read_seldom_grows_and_stays_small() -> None:
    cuda = torch.device("cuda")
    num_slices_of_8b = 32 * 7 + 2
    assert 256 < initial_rows(num_slices_of_8b, cuda) <= CUDA_TABLE_BYTES // (24 * num_slices_of_8b)
    assert initial_rows(1 << 20, cuda) == initial_rows(num_slices_of_8b, CPU) == INITIAL_ROWS


def test_copies_run_beside_reads_of_resident_adapters(tmp_path: Path) -> None:
    """A loader copies in and out of the free half while the owner reads the other half."""
    arena = make_arena()
    resident = write_block(tmp_path / "resident", make_key("resident"))
    placement = load(arena, resident)
    expected = arena.flat[placement.extent.offset : placement.extent.end].clone()
    stored = write_block(tmp_path / "coming", make_key("coming"), seed=1)
    host = HostCache(make_layout(), 1 << 20, torch.float32)
    block = host.read(stored.key, stored.path)
    assert block is not None

    for _ in range(30):
        coming = arena.place(stored.key, block.num_elements, block.table)
        assert coming is not None
        loader = threading.Thread(target=arena.copy_into, args=(coming, block))
        loader.start()
        while loader.is_alive():
            window = arena.flat[placement.extent.offset : placement.extent.end]
            assert torch.equal(window, expected)
        loader.join()
        arena.publish(coming)
        a, _ = matrices(arena, coming.row, 0)
        torch.testing.assert_close(a, stored.matrices(0)[0])
        remove(arena, coming)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies_are_ordered_after_the_zeroing_of_their_extent(tmp_path: Path) -> None:
    device = torch.device("cuda")
    layout = make_layout()
    arena = Arena(layout, 1 << 20, torch.bfloat16, device)
    host = HostCache(layout, 1 << 20, torch.bfloat16, page_locked=True)
    stored = [write_block(tmp_path / str(seed), make_key(str(seed)), seed=seed) for seed in (0, 1)]
    blocks = [host.read(block.key, block.path) for block in stored]
    for _ in range(100):
        for block in blocks:
            assert block is not None
            placement = arena.place(block.key, block.num_elements, block.table)
            assert placement is not None
            arena.copy_into(placement, block)
            arena.publish(placement)
            extent = placement.extent
            assert torch.equal(
                arena.flat[extent.offset : extent.offset + block.num_elements].cpu(), block.tensor
            )
            assert arena.table[placement.row].tolist() == [
                list(entry) for entry in arena.row_tables[placement.row]
            ]
            remove(arena, placement)
    assert not arena.flat.any()
    assert not arena.table.any()


def test_two_tenants_with_equal_content_have_rows_of_their_own(tmp_path: Path) -> None:
    arena = make_arena()
    keys = [AdapterKey("one", "sha256:same"), AdapterKey("two", "sha256:same")]
    placements = [load(arena, write_block(tmp_path / key.tenant_id, key)) for key in keys]
    assert placements[0].row != placements[1].row
    assert not placements[0].extent.overlaps(placements[1].extent)
    remove(arena, placements[0])
    assert arena.published.get(placements[1].row) == (keys[1], placements[1].generation)


def test_a_classification_head_moves_with_its_adapter_and_changes_no_slice() -> None:
    arena = make_arena()
    source = place_extras(arena, "first", Extra(2, ExtraKind.CLASSIFICATION_HEAD, (3, 20)))
    start = source.extent.offset
    size = source.extent.end - start
    arena.flat[start : source.extent.end] = torch.arange(size)
    assert arena.classification_head(source.row) is None, "it is not published"
    arena.publish(source)
    head = arena.classification_head(source.row)
    assert head is not None
    values = head.clone()
    assert values.shape == (3, 20)
    assert values.any()
    assert arena.row_auxiliary[source.row] == {}
    assert arena.replacing_rows == set()
    assert vectors(arena) == {}

    target = arena.place_again(source.row)
    assert target is not None
    arena.copy_between(source, target)
    arena.publish(target)
    remove(arena, source)
    assert not head.any()
    assert arena.classification_head(source.row) is None
    moved = arena.classification_head(target.row)
    assert moved is not None
    assert torch.equal(moved, values)
    remove(arena, target)
    assert arena.row_heads == {}
    assert not arena.flat.any()


def test_an_arena_at_the_end_of_a_memory_grows_towards_its_beginning(tmp_path: Path) -> None:
    size = make_arena().capacity * torch.float32.itemsize
    memory = torch.full((256 + size,), 99, dtype=torch.uint8)[256:]
    capacity = size // torch.float32.itemsize // 4
    memory[-size // 4 :] = 0
    arena = make_arena_at_the_end(memory, capacity)
    assert (arena.capacity, arena.reserved) == (capacity, 4 * capacity)
    first = load(arena, write_block(tmp_path / "first", make_key("first")))
    stored = write_block(tmp_path / "second", make_key("second"), seed=1)
    second = load(arena, stored)
    memory[: -size // 4] = 0
    arena.resize(2 * capacity)
    remove(arena, first)
    moved = arena.place_again(second.row, avoid=[Extent(0, capacity)])
    assert moved is not None
    arena.copy_between(second, moved)
    arena.publish(moved)
    for index in stored.plan.ranks:
        for actual, before in zip(
            matrices(arena, moved.row, index), matrices(arena, second.row, index), strict=True
        ):
            assert torch.equal(actual, before)
            assert actual.any()
    used = memory.nonzero().flatten()
    assert used.min() >= size - 2 * capacity * torch.float32.itemsize
    remove(arena, second)
    remove(arena, moved)
    arena.resize(capacity)
    assert not memory.any(), "what is given up holds zeros"
