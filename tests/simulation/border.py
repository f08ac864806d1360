"""Borders that move at random, within the bounds and far more often than a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from loraplex.adapters.manager import AdapterManager
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.layout import KvGroup, KvOperation
from loraplex.engine.memory.border import Border
from loraplex.engine.memory.budget import Bounds, Budget
from loraplex.engine.memory.host_border import HostBorder
from loraplex.engine.memory.host_plan import SharedHostMemory
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.step_costs import StepCosts
from support.manager import FakeArena

BLOCK_BYTES = 4
INTERVAL_SECONDS = 0.02
"""Between two draws."""


class DrawnBudget(Budget):
    """Draws where the border goes, whatever was lost."""

    def __init__(self, bounds: Bounds, adapter_bytes: int, now: float, rng: Random) -> None:
        super().__init__(bounds, adapter_bytes, now)
        self._rng = rng

    def is_due(self, now: float) -> bool:
        return now - self._decided_at >= INTERVAL_SECONDS

    def _direction(self) -> int:
        return self._rng.choice((-1, 0, 1))


def draw_border(
    seed: int, groups: tuple[KvGroup, ...], arena_cells: int, least_blocks: int
) -> tuple[Bounds | None, tuple[KvGroup, ...]]:
    """Let the blocks of the group that sees everything come and go, for half of the seeds and some
    with stages: those of any place, or the last ones.

    `least_blocks`: those of the longest sequence.
    """
    first = groups[0]
    has_stages = seed % 40 in (15, 39)
    if (seed % 2 and not has_stages) or first.window is not None:
        return None, groups
    rng = Random(-seed - 1)
    num_less = max(first.num_usable - max(least_blocks, 2), 0)
    num_more = rng.randint(1, arena_cells // 4)
    bounds = Bounds(
        total=first.num_usable * BLOCK_BYTES + arena_cells * FakeArena.element_bytes,
        least_adapters=arena_cells * FakeArena.element_bytes - num_more * BLOCK_BYTES,
        least_kv=(first.num_usable - num_less) * BLOCK_BYTES,
        step=BLOCK_BYTES * rng.choice((1, 2, 4)),
    )
    moving = KvGroup(
        *(first.layers, None, 0, first.num_blocks),
        num_more=num_more,
        num_less=num_less,
        gives_end=rng.random() < 0.5,
    )
    return bounds, (moving, *groups[1:])


def draw_host_memory(
    seed: int, groups: tuple[KvGroup, ...], num_slots: tuple[int, ...], host_cells: int
) -> tuple[SharedHostMemory | None, tuple[int, ...]]:
    """Let the host slots of the group that sees everything come and go, for some of the seeds.

    `num_slots`: of each group, at the start.
    """
    is_drawn = seed % 8 == 0 or seed % 13 in (0, 8)
    if not is_drawn or groups[0].window is not None or num_slots[0] < 2:
        return None, num_slots
    rng = Random(-seed - 2)
    adapter_bytes = host_cells * FakeArena.element_bytes
    bounds = Bounds(
        total=adapter_bytes + num_slots[0] * BLOCK_BYTES,
        least_adapters=host_cells // rng.randint(2, 4) * FakeArena.element_bytes,
        least_kv=BLOCK_BYTES * rng.randint(1, num_slots[0]),
        step=BLOCK_BYTES * rng.choice((1, 2, 4)),
    )
    shared = SharedHostMemory(bounds, 0, BLOCK_BYTES)
    return shared, (shared.num_slots, *num_slots[1:])


def open_host_border(
    memory: SharedHostMemory,
    *,
    seed: int,
    adapter_bytes: int,
    block_size: int,
    kv: KvBlocks,
    manager: AdapterManager[Any],
    costs: StepCosts,
    clock: Callable[[], float],
) -> HostBorder:
    border = HostBorder(
        memory,
        adapter_bytes=adapter_bytes,
        kv=kv,
        block_size=block_size,
        manager=manager,
        costs=costs,
        clock=clock,
    )
    border._budget = DrawnBudget(memory.bounds, adapter_bytes, clock(), Random(seed))
    return border


def open_border(
    bounds: Bounds,
    *,
    seed: int,
    block_size: int,
    kv: KvBlocks,
    manager: AdapterManager[Any],
    scheduler: Scheduler,
    costs: StepCosts,
    clock: Callable[[], float],
    execute: Callable[[Sequence[KvOperation]], None],
    num_given_back: Callable[[], int],
) -> Border:
    border = Border(
        bounds,
        kv=kv,
        block_bytes=BLOCK_BYTES,
        block_size=block_size,
        manager=manager,
        scheduler=scheduler,
        costs=costs,
        clock=clock,
        execute=execute,
        num_given_back=num_given_back,
    )
    border._budget = DrawnBudget(bounds, manager.arena_bytes, clock(), Random(seed))
    return border
