"""The border of a group of ranks moves on every rank, between the same two steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from loraplex.adapters.arena import Arena
from loraplex.adapters.extents import Extent, Placement
from loraplex.adapters.host_cache import HostBlock
from loraplex.adapters.record import Departure
from loraplex.engine.errors import RankLost, StaleExtent
from loraplex.engine.kv.cache import KvCache
from loraplex.engine.memory import plan
from loraplex.engine.memory.budget import Budget
from loraplex.engine.ranks.follower_arena import FollowerArena
from loraplex.engine.shards.rank_place import GroupShape
from support.blocks import make_key, make_layout
from support.borders import between_the_sides, open_engine, open_moving, serve, swing
from support.engine import LocalEngine
from support.models import make_adapter, make_tiny_llama
from support.ranks import followers_as_threads

NUM_ADAPTERS = 4
NUM_ROUNDS = 2


class Case(NamedTuple):
    """How the memory of a group is used."""

    shape: GroupShape
    is_divided: bool
    """As on CUDA."""
    is_async: bool = False


CASES = (
    Case(GroupShape(1, 2), is_divided=True),
    Case(GroupShape(2, 1), is_divided=False),
    Case(GroupShape(2, 1), is_divided=True, is_async=True),
    Case(GroupShape(4, 1), is_divided=False),
    Case(GroupShape(1, 2), is_divided=False),
    Case(GroupShape(1, 3), is_divided=True),
    Case(GroupShape(2, 2), is_divided=True),
)
"""Of four ranks two hold the same KV heads."""


class Traffic(NamedTuple):
    base: Path
    adapters: list[Path]
    expected: list[list[int]]
    """The tokens of one process with a fixed border."""


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    """Over a base of three layers, of which the first of two stages has two."""
    folder = tmp_path_factory.mktemp("traffic")
    base = make_tiny_llama(folder / "base", num_hidden_layers=3)
    adapters = [make_adapter(base, folder / str(seed), seed=seed) for seed in range(NUM_ADAPTERS)]
    alone = open_engine(base, folder, prefix_caching=False)
    expected = serve(alone, adapters, num_rounds=NUM_ROUNDS)
    alone.close()
    return Traffic(base, adapters, expected)


def open_group(traffic: Traffic, folder: Path, case: Case) -> LocalEngine:
    return open_moving(
        traffic.base,
        folder,
        num_mib=3 if case.shape.size == 2 else 2.4,
        num_threads=1,
        tensor_parallel_size=case.shape.ranks_per_stage,
        pipeline_parallel_size=case.shape.num_stages,
        async_scheduling=case.is_async or None,
    )


class Sizes:
    """Of one rank's KV cache and arena, whenever the arena has got another size."""

    def __init__(self, arena: Arena, cache: KvCache) -> None:
        self.arena, self.cache = arena, cache
        self.of_arena: list[int] = []
        """Elements."""
        self.of_cache: list[int] = []
        """Usable blocks."""
        self._resize = arena.resize
        arena.resize = self._note  # type: ignore[method-assign]

    def _note(self, capacity: int) -> None:
        """What the arena gets is zero, and so is what nobody has."""
        arena, cache, old = self.arena, self.cache, self.arena.capacity
        self._resize(capacity)
        self.of_arena.append(arena.capacity)
        self.of_cache.append(cache.num_usable(0))
        if arena.capacity > old:
            assert not arena._part(Extent(old, arena.capacity - old)).any()
        if cache._block_memory is not None:
            assert not between_the_sides(arena, cache, cache.num_usable(0)).any()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_moves_the_border_and_the_tokens_are_those_of_one_process(
    case: Case, traffic: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "divides_memory", lambda _memory: case.is_divided)
    with followers_as_threads() as followers:
        engine = open_group(traffic, tmp_path, case)
        parts, border = engine.core.parts, swing(engine)
        (group,), bounds = parts.kv.groups, parts.plan.border
        assert bounds is not None
        assert group.layout.gives_end == case.is_divided
        ranks = [Sizes(parts.tiers.arena, parts.runner.cache)]
        ranks += [Sizes(follower.arena, follower._cache) for follower in followers]
        assert serve(engine, traffic.adapters, num_rounds=NUM_ROUNDS) == traffic.expected
        parts.kv.check_integrity(())
        parts.runner.execute_at_rest(parts.kv.operations.take())
        engine.close()
    first = ranks[0]
    for rank in ranks:
        assert rank.of_arena == first.of_arena
        assert rank.cache.num_usable(0) == group.pool.num_usable
        assert rank.cache.num_given_back == first.cache.num_given_back > 0
        assert min(rank.of_cache) >= group.num_lasting
    moved = {larger > smaller for smaller, larger in pairwise(first.of_arena)}
    assert moved == {True, False}, "both sides got room"
    assert border.num_moves > 10
    num_bytes = [size * parts.tiers.arena.element_bytes for size in first.of_arena]
    assert bounds.least_adapters <= min(num_bytes) < max(num_bytes) <= bounds.most_adapters


class Directed(Budget):
    """Wants the border at one end."""

    wants_all_for_adapters = True

    def is_due(self, now: float) -> bool:
        return True

    def _direction(self) -> int:
        return 1 if self.wants_all_for_adapters else -1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_adapters_take_room_from_cold_prefixes_on_every_rank_and_give_it_back(
    case: Case, traffic: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no step follows, too."""
    monkeypatch.setattr(plan, "divides_memory", lambda _memory: case.is_divided)
    with followers_as_threads() as followers:
        engine = open_group(traffic, tmp_path, case)
        parts = engine.core.parts
        border, bounds, manager = parts.border, parts.plan.border, parts.tiers.manager
        assert border is not None
        assert bounds is not None
        for first in range(12):
            engine.submit([first, *range(100)], max_tokens=1)
        engine.run()
        num_cached = len(parts.kv.groups[0].cached)
        border._budget = budget = Directed(bounds, manager.arena_bytes, parts.clock())
        step_until(engine, lambda: manager.arena_bytes == bounds.most_adapters)
        (follower,) = followers
        assert len(parts.kv.groups[0].cached) < num_cached
        for folder in traffic.adapters:
            engine.submit([5, 6, 7], engine.add_adapter(folder), max_tokens=1)
        engine.run()
        assert manager.reports.tier_stats().evictions[Departure.KV] == 0
        budget.wants_all_for_adapters = False
        step_until(engine, lambda: manager.arena_bytes == bounds.least_adapters)
        assert manager.reports.tier_stats().evictions[Departure.KV] > 0
        assert serve(engine, traffic.adapters, num_rounds=1) == traffic.expected[:8]
        engine.close()
        assert follower.arena.capacity_bytes == bounds.least_adapters
        assert follower._cache.num_usable(0) == parts.kv.groups[0].pool.num_usable


def step_until(engine: LocalEngine, is_there: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_there():
            return
        engine.step()
    raise AssertionError("the border stays where it is")


def test_a_rank_that_cannot_move_the_border_is_lost(
    traffic: Traffic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_arena: FollowerArena, _capacity: int) -> None:
        raise StaleExtent

    monkeypatch.setattr(FollowerArena, "resize", fail)
    with followers_as_threads():
        engine = open_group(traffic, tmp_path, CASES[1])
        swing(engine)
        with pytest.raises(RankLost):
            serve(engine, traffic.adapters)
        engine.close()


def test_a_follower_refuses_a_place_outside_of_its_arena_and_a_size_without_its_adapters() -> None:
    arena = FollowerArena(make_layout(), 4096, torch.float32, torch.device("cpu"))
    table = np.zeros((len(make_layout().slices), 3), dtype=np.int64)
    block = HostBlock(make_key("a"), torch.zeros(64), table, (), Extent(0, 64))
    arena.occupy(Placement(0, 1, Extent(64, 64)), block)
    with pytest.raises(StaleExtent):
        arena.occupy(Placement(1, 1, Extent(1024, 64)), block)
    with pytest.raises(StaleExtent):
        arena.occupy_again(0, Placement(1, 1, Extent(992, 64)))
    arena.resize(128)
    with pytest.raises(StaleExtent):
        arena.resize(64)
