"""Host memory for adapters grows and shrinks while it holds blocks, beside others' memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.adapters.errors import ArenaTooSmall
from loraplex.adapters.host_cache import HostBlock, HostCache
from loraplex.adapters.identity import AdapterKey
from support.blocks import StoredBlock, make_key, make_layout, write_block

OTHERS = 7
"""What others have written into their memory."""


class World:
    """A cache of equal blocks, in memory for eight of them."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self.stored: dict[str, StoredBlock] = {}
        whole = HostCache(make_layout(), 1 << 20, torch.float32)
        first = self._write("size")
        block = whole.read(first.key, first.path)
        assert block is not None
        self.size = block.extent.size * 4
        self.memory = torch.full((8 * self.size,), OTHERS, dtype=torch.uint8)
        self.memory[: count * self.size] = 0
        self.cache = HostCache(make_layout(), count * self.size, torch.float32, memory=self.memory)

    def _write(self, name: str) -> StoredBlock:
        self.stored[name] = write_block(self._folder / name, make_key(name), seed=len(self.stored))
        return self.stored[name]

    def read(self, name: str) -> HostBlock | None:
        stored = self.stored.get(name) or self._write(name)
        return self.cache.read(stored.key, stored.path)

    def put(self, *names: str) -> None:
        """Blocks that nobody uses."""
        for name in names:
            assert self.read(name) is not None
            self.cache.release(make_key(name))

    def resize(self, count: int) -> bool:
        return self.cache.resize(count * self.size)

    def held(self) -> set[str]:
        return {key.digest.removeprefix("sha256:") for key in self.cache.extents()}

    def after(self, count: int) -> torch.Tensor:
        return self.memory[count * self.size :]

    def assert_right(self, name: str) -> None:
        """What is cached is what reading the file again gives, and lies within the cache."""
        stored = self.stored[name]
        again = HostCache(make_layout(), self.size, torch.float32).read(stored.key, stored.path)
        block = self.cache.acquire(stored.key)
        assert block is not None
        assert again is not None
        assert torch.equal(block.tensor, again.tensor)
        assert block.extent.end * 4 <= self.cache.capacity_bytes
        self.cache.release(stored.key)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, 4)


def key(name: str) -> AdapterKey:
    return make_key(name)


def test_blocks_at_the_end_move_to_room_before_it(world: World) -> None:
    world.put("a", "b", "c", "d")
    world.cache.remove(key("a"))
    assert world.resize(3)
    assert world.held() == {"b", "c", "d"}
    for name in "bcd":
        world.assert_right(name)
    assert not world.after(3)[: world.size].any(), "what is taken away holds zeros"


def test_the_least_recently_used_go_where_there_is_no_room(world: World) -> None:
    world.put("a", "b", "c", "d")
    assert world.resize(2)
    assert world.held() == {"c", "d"}
    for name in "cd":
        world.assert_right(name)
    assert not world.after(2)[: 2 * world.size].any()


def test_the_memory_of_others_is_not_touched(world: World) -> None:
    world.put("a", "b", "c", "d", "e")
    assert world.resize(2)
    world.after(2).fill_(OTHERS)
    world.put("f", "g")
    assert bool((world.after(2) == OTHERS).all())


def test_a_larger_cache_has_room_at_once_and_it_is_zeroed(world: World) -> None:
    world.put("a", "b", "c", "d")
    assert world.resize(6)
    assert not world.after(4)[: 2 * world.size].any()
    world.put("e", "f")
    assert world.held() == {"a", "b", "c", "d", "e", "f"}
    world.assert_right("f")


def test_a_block_in_use_at_the_end_is_waited_for_and_nothing_is_placed_there(world: World) -> None:
    world.put("a", "b", "c")
    assert world.read("d") is not None
    assert not world.resize(3)
    assert world.cache.capacity_bytes == 4 * world.size
    world.assert_right("c")
    world.cache.release(key("d"))
    assert world.resize(3)
    assert "d" in world.held()
    world.assert_right("d")


def test_no_read_takes_the_end_while_it_is_cleared(world: World) -> None:
    world.put("a")
    for name in "bcd":
        assert world.read(name) is not None
    world.cache.remove(key("c"))
    assert not world.resize(3)  # for d; what was c's is free
    assert world.read("e") is not None
    assert not world.resize(3)
    assert world.read("f") is not None  # a goes
    assert world.held() == {"b", "d", "e", "f"} - {"a"}
    assert world.read("g") is None


def test_a_change_that_is_given_up_leaves_the_old_size(world: World) -> None:
    for name in "abcd":
        assert world.read(name) is not None
    assert not world.resize(2)
    assert world.resize(4)
    world.cache.release(key("d"))
    world.put("e")
    assert world.held() == {"a", "b", "c", "e"}


def test_a_block_waits_for_room_that_the_memory_could_give(world: World, tmp_path: Path) -> None:
    assert world.resize(1)
    large = write_block(tmp_path / "large", key("large"), ranks={0: 16})
    assert world.cache.read(large.key, large.path) is None
    assert world.cache.capacity_bytes < world.cache.refused_bytes <= len(world.memory)
    assert world.resize(8)
    assert world.cache.read(large.key, large.path) is not None


def test_a_block_that_is_larger_than_the_cache_evicts_nothing(world: World, tmp_path: Path) -> None:
    assert world.resize(2)
    world.put("a", "b")
    large = write_block(tmp_path / "large", key("large"), ranks={0: 48})
    assert world.cache.read(large.key, large.path) is None
    assert world.cache.refused_bytes > world.cache.capacity_bytes
    assert world.held() == {"a", "b"}


def test_a_block_beyond_all_memory_is_refused(world: World, tmp_path: Path) -> None:
    huge = write_block(tmp_path / "huge", key("huge"), ranks={0: 500})
    with pytest.raises(ArenaTooSmall):
        world.cache.read(huge.key, huge.path)


def test_what_somewhat_more_memory_would_hold_is_remembered_once(world: World) -> None:
    world.cache.remember_evicted(2 * world.size)
    world.put("a", "b", "c", "d", "e", "f", "g")  # a, b and c go
    assert [world.cache.take_ghost(key(name)) for name in "abcd"] == [False, True, True, False]
    assert not world.cache.take_ghost(key("b"))


def test_a_deleted_block_is_not_remembered(world: World) -> None:
    world.cache.remember_evicted(8 * world.size)
    world.put("a", "b", "c", "d", "e")
    world.cache.remove(key("a"))
    assert not world.cache.take_ghost(key("a"))
