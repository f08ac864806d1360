"""Every rank holds its part of an adapter where rank 0 says, and nothing of a deleted one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from loraplex.adapters.block_files import BlockFiles
from loraplex.adapters.block_reader import BlockReader
from loraplex.adapters.identity import AdapterKey, composed_key
from loraplex.engine.errors import RankLost, StaleExtent
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.messages import DeleteAdapter
from loraplex.engine.ranks.commands import Chunk, LeasedRow, RunChunks, pack_tables
from loraplex.engine.ranks.follower import Follower
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.models import make_adapter
from support.ranks import followers_as_threads

PROMPT = [3, 17, 5, 90]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


def open_engine(model: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine(model, tmp_path, dtype="float32", num_threads=1, tensor_parallel_size=2)


def add_adapters(engine: LocalEngine, model: Path, tmp_path: Path, count: int) -> list[AdapterKey]:
    folders = [make_adapter(model, tmp_path / str(r), seed=r, r=1 + r) for r in range(count)]
    return [engine.add_adapter(folder) for folder in folders]


def assert_holds_part(follower: Follower, engine: LocalEngine, key: AdapterKey) -> None:
    """The row of an adapter leads to this rank's part, as a reader of the file makes it."""
    files = BlockFiles.open(key, [engine.paths[part] for part in key.parts])
    reader = BlockReader(follower.base.part)
    plan = reader.plan(files)
    expected = torch.zeros(plan.num_elements)
    reader.fill(expected, files, plan)
    rows = [row for row, (held, _) in follower.arena.published.items() if held == key]
    assert len(rows) == 1
    offset = min(follower.arena.row_tables[rows[0]][index][0] for index in files.ranks)
    assert torch.equal(follower.arena.flat[offset : offset + plan.num_elements], expected)


def test_followers_hold_their_parts_at_rank_0s_rows(model: Path, tmp_path: Path) -> None:
    with followers_as_threads() as followers:
        engine = open_engine(model, tmp_path)
        keys = add_adapters(engine, model, tmp_path, 3)
        keys.append(composed_key("acme", {key.digest: -0.5 for key in keys}))
        for key in keys:
            engine.generate(PROMPT, key)
        arena = engine.core.parts.tiers.arena
        for follower in followers:
            assert follower.arena.published == arena.published
            assert follower.arena.row_tables == arena.row_tables
            for key in keys:
                assert_holds_part(follower, engine, key)
        engine.close()


def test_no_rank_holds_a_byte_of_a_deleted_adapter(model: Path, tmp_path: Path) -> None:
    with followers_as_threads() as followers:
        engine = open_engine(model, tmp_path)
        (key,) = add_adapters(engine, model, tmp_path, 1)
        engine.generate(PROMPT, key)
        (follower,) = followers
        assert follower.arena.flat.any()
        assert follower.host.pool.any()
        engine.core.handle(DeleteAdapter(key, drain_seconds=1.0))
        engine.run()
        assert engine.evicted == [key]
        assert not follower.arena.flat.any()
        assert not follower.host.pool.any()
        assert not follower.arena.published
        engine.close()


def test_every_rank_reports_its_memory(model: Path, tmp_path: Path) -> None:
    with followers_as_threads() as followers:
        engine = open_engine(model, tmp_path)
        (key,) = add_adapters(engine, model, tmp_path, 1)
        engine.generate(PROMPT, key)
        (follower,) = followers
        while not (reported := engine.core.stats().ranks[1:]) or not reported[0].arena_used_bytes:
            time.sleep(0.05)
        own, other = engine.core.stats().ranks
        engine.close()
    assert (own.rank, other.rank) == (0, 1)
    assert own.arena_bytes == other.arena_bytes == follower.arena.flat.nbytes
    used = engine.core.parts.tiers.arena.used_bytes
    assert own.arena_used_bytes == other.arena_used_bytes == used > 0
    assert own.host_used_bytes == engine.core.parts.tiers.host.used_bytes > 0
    assert other.host_used_bytes == follower.host.used_bytes > 0
    assert own.kv_bytes == other.kv_bytes == engine.core.parts.runner.kv_bytes > 0
    assert other.weight_bytes == follower.base.weight_bytes
    assert own.resident_bytes > own.weight_bytes


def test_every_rank_reports_its_stage_and_rank_0_is_in_the_last(
    model: Path, tmp_path: Path
) -> None:
    with followers_as_threads():
        engine = LocalEngine(
            model, tmp_path, dtype="float32", num_threads=1, pipeline_parallel_size=2
        )
        engine.generate(PROMPT)
        while len(reported := engine.core.stats().ranks) < 2:
            time.sleep(0.05)
        engine.close()
    assert [(stats.rank, stats.stage) for stats in reported] == [(0, 1), (1, 0)]


def test_a_follower_refuses_a_row_that_holds_another_adapter(model: Path, tmp_path: Path) -> None:
    with followers_as_threads() as followers:
        engine = open_engine(model, tmp_path)
        first, second = add_adapters(engine, model, tmp_path, 2)
        engine.generate(PROMPT, first)
        (follower,) = followers
        (row,) = follower.arena.published
        generation = follower.arena.published[row][1]
        tables = pack_tables([block_table([1])])
        for leased in (LeasedRow(row, generation, second), LeasedRow(row, generation + 1, first)):
            chunk = Chunk((1,), 0, tables, 1, None, False, 0, 0, 0, leased)
            with pytest.raises(StaleExtent):
                follower.steps.run(RunChunks((chunk,)))
        engine.close()


def test_an_engine_whose_follower_is_gone_ends_with_rank_lost(model: Path, tmp_path: Path) -> None:
    with followers_as_threads() as followers:
        engine = open_engine(model, tmp_path)
        engine.submit(PROMPT)
        while not followers:  # its thread may still load
            time.sleep(0.01)
        (follower,) = followers
        follower.pipe.close()
        with pytest.raises(RankLost):
            engine.run()
        engine.close()
