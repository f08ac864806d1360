"""The border between KV cache and arena moves while requests are served, with memory of their own
as on the CPU, and in one memory as on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters.record import Departure
from loraplex.engine.memory import plan
from loraplex.engine.memory.border import Border
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.reports.memory import map_memory
from support.borders import between_the_sides, open_engine, open_moving, serve, swing
from support.eagle import save_random_head
from support.engine import MIB, LocalEngine
from support.marks import marked_slow
from support.models import make_adapter

NUM_ADAPTERS = 6
BLOCK_BYTES = 8192
"""Of 16 tokens of the tiny base in fp32."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, folder / str(seed), seed=seed) for seed in range(NUM_ADAPTERS)]


@pytest.fixture(params=marked_slow(["own", "divided"], slow=["divided"]))
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "divided":
        monkeypatch.setattr(plan, "divides_memory", lambda _memory: True)
    return str(request.param)


@pytest.fixture
def moving(tiny_base: Path, tmp_path: Path, memory: str) -> Iterator[LocalEngine]:
    engine = open_moving(tiny_base, tmp_path)
    assert (engine.core.parts.kv.groups[0].layout.gives_end) == (memory == "divided")
    yield engine
    engine.core.close()


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, adapters: list[Path]
) -> list[list[int]]:
    """With a fixed border."""
    fixed = open_engine(tiny_base, tmp_path_factory.mktemp("fixed"), prefix_caching=False)
    tokens = serve(fixed, adapters)
    fixed.core.close()
    return tokens


@pytest.mark.slow
def test_moves_of_the_border_change_no_token_and_no_address(
    adapters: list[Path], expected: list[list[int]], moving: LocalEngine
) -> None:
    parts = moving.core.parts
    border, bounds = swing(moving), parts.plan.border
    assert bounds is not None
    addresses = [parts.tiers.arena.flat.data_ptr(), *_kv_addresses(moving)]
    assert serve(moving, adapters) == expected
    assert border.num_moves > 20
    assert [parts.tiers.arena.flat.data_ptr(), *_kv_addresses(moving)] == addresses
    parts.kv.check_integrity(request.kv for request in parts.scheduler.requests())
    stats = moving.core.stats()
    assert stats.arena_bytes + stats.kv_cache_bytes <= bounds.total
    assert stats.num_border_moves == border.num_moves


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["draft", "eagle_tree"])
def test_moves_of_the_border_leave_a_cache_of_drafts_as_it_is(
    tiny_base: Path,
    adapters: list[Path],
    expected: list[list[int]],
    memory: str,
    drafter: str,
    tmp_path: Path,
) -> None:
    checkpoint = tiny_base
    if drafter == "eagle_tree":
        save_random_head(tiny_base, checkpoint := tmp_path / "head")
    engine = open_moving(tiny_base, tmp_path, num_mib=4, speculation=(f"{drafter}:{checkpoint}",))
    border, parts = swing(engine), engine.core.parts
    drafts = SpeculationParams(num_tokens=3)
    assert serve(engine, adapters, speculation=drafts) == expected
    assert border.num_moves > 20
    parts.kv.check_integrity(request.kv for request in parts.scheduler.requests())
    totals = engine.core.stats().speculation_totals[0]
    assert totals.num_draft_tokens > 200
    engine.core.close()


def _kv_addresses(engine: LocalEngine) -> list[int]:
    cache = engine.core.parts.runner._cache
    return [pages.data.data_ptr() for pages in (*cache.keys.values(), *cache.values.values())]


@pytest.mark.parametrize("memory", ["divided"], indirect=True)
def test_blocks_move_under_running_requests_behind_a_step_in_flight_and_leave_zeros(
    tiny_base: Path,
    adapters: list[Path],
    expected: list[list[int]],
    memory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = open_moving(tiny_base, tmp_path, async_scheduling=True)
    parts, border = engine.core.parts, swing(engine)
    (group,) = parts.kv.groups
    num_held = 0

    def poll() -> None:
        nonlocal num_held
        held = [request.kv.tables[0] for request in parts.scheduler.requests()]
        Border.poll(border)
        now = [request.kv.tables[0] for request in parts.scheduler.requests()]
        num_held += sum(one is not other for one, other in zip(held, now, strict=True))
        arena, cache = parts.tiers.arena, parts.runner.cache
        assert not between_the_sides(arena, cache, group.pool.num_usable).any()
        parts.kv.check_integrity(request.kv for request in parts.scheduler.requests())

    monkeypatch.setattr(border, "poll", poll)
    assert serve(engine, adapters) == expected
    assert min(group.num_moved, num_held, border.num_moves) > 10
    engine.core.close()


def test_where_a_side_is_fixed_no_border_moves(tiny_base: Path, tmp_path: Path) -> None:
    engine = open_engine(tiny_base, tmp_path, arena_bytes=None, memory_bytes=64 * MIB)
    assert engine.core.parts.border is None
    stats = engine.core.stats()
    assert stats.num_border_moves == 0
    assert stats.arena_bytes == engine.core.info.arena_bytes
    assert stats.kv_cache_bytes == engine.core.info.num_kv_blocks * BLOCK_BYTES
    engine.core.close()


def test_requests_are_judged_by_the_blocks_that_the_cache_always_has(moving: LocalEngine) -> None:
    (group,) = moving.core.parts.kv.groups
    assert group.layout.may_move
    assert group.num_lasting * 16 >= moving.core.info.max_model_len
    assert group.fits_alone(moving.core.info.max_model_len, 128)


@pytest.mark.parametrize("memory", ["own"], indirect=True)
def test_the_memory_map_shows_the_arena_as_it_is_now(
    adapters: list[Path], moving: LocalEngine
) -> None:
    parts = moving.core.parts
    bounds, manager = parts.plan.border, parts.tiers.manager
    assert bounds is not None
    for folder in adapters:
        moving.submit([5, 6, 7], moving.add_adapter(folder), max_tokens=1, ignore_eos=True)
    moving.run()
    swing(moving)
    sizes = set()
    for _ in range(20):
        moving.submit([5, 6, 7], None, max_tokens=10, ignore_eos=True)
        moving.run()
        mapped = map_memory(
            1, manager, parts.scheduler, parts.kv, kv_block_bytes=parts.plan.kv_block_bytes
        )
        held = sum(extent.num_bytes for extent in mapped.extents)
        assert held <= mapped.arena_bytes - mapped.free_bytes
        assert mapped.arena_bytes + mapped.kv.num_blocks * BLOCK_BYTES <= bounds.total
        sizes.add(mapped.arena_bytes)
    assert len(sizes) > 3
    assert manager.reports.tier_stats().evictions[Departure.KV] > 0
