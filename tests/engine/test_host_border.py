"""The border between adapters and KV blocks in host memory moves while requests are served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.memory.host_border import HostBorder
from loraplex.engine.scheduling.step_costs import StepCosts
from support.borders import Swinging
from support.engine import LocalEngine
from support.models import make_adapter

MIB = 1 << 20
BLOCK = 16
NUM_BLOCKS = 14
BLOCK_BYTES = 8192
"""Of the tiny base, in fp32."""
NUM_ADAPTERS = 6
SHARED = [[(7 * index + 31 * kind) % 90 + 3 for index in range(70)] for kind in range(4)]


@pytest.fixture(autouse=True)
def _free_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pay, whatever was measured."""
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, folder / str(seed), seed=seed) for seed in range(NUM_ADAPTERS)]


def open_engine(model: Path, folder: Path, **config: object) -> LocalEngine:
    """In fp32, with few KV blocks and room for two adapters on the device."""
    settings = {
        "dtype": "float32",
        "kv_cache_bytes": NUM_BLOCKS * BLOCK_BYTES,
        "arena_bytes": 128 << 10,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        **config,
    }
    return LocalEngine(model, folder, **settings)


@pytest.fixture
def moving(tiny_base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    engine = open_engine(tiny_base, tmp_path, host_bytes=MIB, host_cache_bytes=None)
    yield engine
    engine.core.close()


def border_of(engine: LocalEngine) -> HostBorder:
    border = engine.core.parts.host_border
    assert border is not None
    return border


def await_resizing(border: HostBorder) -> None:
    if border._resizing is not None:
        border._resizing.result()


def await_every_resizing(border: HostBorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step find the loader threads' work done: what slots have does not depend on time."""
    is_resizing = border._is_resizing

    def wait() -> bool:
        await_resizing(border)
        return is_resizing()

    monkeypatch.setattr(border, "_is_resizing", wait)


def serve(engine: LocalEngine, folders: list[Path]) -> list[list[int]]:
    """The tokens of requests with shared beginnings, some at once, with every adapter again and
    again, more than the device holds."""
    keys: list[AdapterKey | None] = [None, *(engine.add_adapter(folder) for folder in folders)]
    rng = random.Random(0)
    tokens = []
    for _ in range(5):
        names = [
            engine.submit(
                [*rng.choice(SHARED)[: rng.choice((33, 50, 70))], rng.randrange(90)],
                rng.choice(keys),
                max_tokens=12,
                ignore_eos=True,
            )
            for _ in range(6)
        ]
        engine.run()
        tokens += [engine.answers[name].token_ids for name in names]
    return tokens


@pytest.mark.slow
def test_moves_of_the_border_change_no_token_and_each_side_has_what_the_other_gave(
    tiny_base: Path,
    adapters: list[Path],
    moving: LocalEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixed = open_engine(tiny_base, tmp_path, prefix_caching=False)
    expected = serve(fixed, adapters), serve(fixed, [])
    fixed.core.close()
    parts, border = moving.core.parts, border_of(moving)
    await_every_resizing(border, monkeypatch)
    shared = parts.plan.host.shared
    assert shared is not None
    border._budget = Swinging(shared.bounds, parts.tiers.manager.host_bytes, parts.clock())
    # Steps that wait for adapters move the border; those of the base alone come back to prefixes.
    assert (serve(moving, adapters), serve(moving, [])) == expected
    assert border.num_moves > 20
    parts.kv.check_integrity(request.kv for request in parts.scheduler.requests())
    stats = moving.core.stats()
    assert stats.num_host_border_moves == border.num_moves
    assert stats.num_host_cached_tokens > 0, "prefixes came back from slots that have moved"
    num_slots = parts.kv.groups[shared.group].host.num_slots
    assert stats.host_cache_bytes == parts.tiers.host.capacity_bytes
    assert stats.host_cache_bytes + num_slots * shared.slot_bytes <= shared.bounds.total


def test_both_sides_are_in_one_memory(moving: LocalEngine) -> None:
    parts = moving.core.parts
    shared, slots = parts.plan.host.shared, parts.tiers.slot_memory
    assert shared is not None
    assert slots is not None
    assert slots.memory.nbytes == shared.bounds.total <= MIB
    storage = slots.memory.untyped_storage().data_ptr()
    assert parts.tiers.host._pool.untyped_storage().data_ptr() == storage
    for tensor in parts.runner.cache._host[shared.group].tensors:
        assert tensor.untyped_storage().data_ptr() == storage


def test_a_burst_of_adapters_takes_memory_from_prefixes_and_long_prompts_take_it_back(
    tiny_base: Path, adapters: list[Path], moving: LocalEngine
) -> None:
    parts, border = moving.core.parts, border_of(moving)
    manager, bounds = parts.tiers.manager, border._bounds
    now = [parts.clock()]
    border._clock = lambda: now[0]

    def pass_time(loss: str, seconds: float) -> int:
        """Lose on one side in every step until the border is at an end; what adapters have then."""
        for _ in range(200):
            now[0] += 0.5
            if manager.host_bytes == (bounds.most_adapters if seconds else bounds.least_adapters):
                break
            if loss == "adapters":
                manager._loads.reread_seconds += seconds
            else:
                parts.kv.num_lost_host_tokens += 10_000
            moving.core.step()
            await_resizing(border)
        return manager.host_bytes

    serve(moving, [])  # the costs of a step are known
    before = manager.host_bytes
    most = pass_time("adapters", 0.4)
    assert most == bounds.most_adapters > before
    assert pass_time("prefixes", 0.0) == bounds.least_adapters
    border._clock = parts.clock
    assert all(map(len, serve(moving, adapters))), "every adapter is served beside the floor"


def test_without_the_option_each_side_keeps_its_own(tiny_base: Path, tmp_path: Path) -> None:
    engine = open_engine(tiny_base, tmp_path, host_cache_bytes=MIB, swap_bytes=MIB)
    parts = engine.core.parts
    assert parts.host_border is None
    assert parts.tiers.host.capacity_bytes == MIB == engine.core.info.host_cache_bytes
    assert parts.kv.groups[0].host.num_slots == MIB // BLOCK_BYTES
    stats = engine.core.stats()
    assert (stats.num_host_border_moves, stats.host_cache_bytes) == (0, MIB)
    engine.core.close()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("host_cache_bytes", {"host_cache_bytes": MIB}),
        ("swap_bytes", {"swap_bytes": MIB}),
        ("host_bytes", {"tensor_parallel_size": 2}),
    ],
)
def test_one_budget_is_not_set_beside_its_parts_nor_for_ranks(
    field: str, values: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        EngineConfig("model", host_bytes=2 * MIB, **values)
    assert refused.value.param == field


def test_removed_adapters_leave_nothing_in_the_memory_that_adapters_have(
    adapters: list[Path], moving: LocalEngine
) -> None:
    border, parts = border_of(moving), moving.core.parts
    shared = parts.plan.host.shared
    assert shared is not None
    border._budget = Swinging(shared.bounds, parts.tiers.manager.host_bytes, parts.clock())
    serve(moving, adapters)
    await_resizing(border)
    host = parts.tiers.host
    for key in host.extents():
        host.remove(key)
    assert host.used_bytes == 0
    memory = parts.tiers.slot_memory
    assert memory is not None
    free = memory.memory[: parts.tiers.host.capacity_bytes]
    await_resizing(border)
    assert not torch.count_nonzero(free)
