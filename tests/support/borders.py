"""Engines whose border moves at every chance, and traffic for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from loraplex.adapters.arena import Arena
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.execution import profiling
from loraplex.engine.kv.cache import KvCache
from loraplex.engine.memory.border import Border
from loraplex.engine.memory.budget import Budget
from support.engine import MIB, LocalEngine

ACTIVATION_BYTES = MIB // 2
"""Of a full step, whatever is measured: of so small a base, that depends on what ran before."""
SHARED = [7 * index % 90 + 3 for index in range(40)]


class Swinging(Budget):
    """Wants the border as far at one end as it goes, then at the other."""

    wants_more_for_adapters = True

    def is_due(self, now: float) -> bool:
        return True

    def _direction(self) -> int:
        bounds = self.bounds
        if self.adapter_bytes + bounds.step > bounds.most_adapters:
            self.wants_more_for_adapters = False
        if self.adapter_bytes - bounds.step < bounds.least_adapters:
            self.wants_more_for_adapters = True
        return 1 if self.wants_more_for_adapters else -1


def swing(engine: LocalEngine) -> Border:
    """Move this engine's border, which must not be fixed, at every chance."""
    parts = engine.core.parts
    border, bounds = parts.border, parts.plan.border
    assert border is not None
    assert bounds is not None
    border._budget = Swinging(bounds, parts.tiers.manager.arena_bytes, parts.clock())
    return border


def open_engine(model: Path, folder: Path, **config: object) -> LocalEngine:
    """In fp32, with a small batch: 32 blocks of KV for a full one."""
    return LocalEngine(
        model,
        folder,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        host_cache_bytes=MIB,
        **config,
    )


def open_moving(model: Path, folder: Path, *, num_mib: float = 3, **config: object) -> LocalEngine:
    """The border is not fixed, and the arena holds from two adapters to all."""
    pools = {"kv_cache_bytes": None, "arena_bytes": None, "memory_bytes": int(num_mib * MIB)}
    with patch.object(profiling, "peak_bytes", _run_and_take):
        return open_engine(model, folder, **pools, **config)


def _run_and_take(_device: torch.device, run: Callable[[], object]) -> int:
    run()
    return ACTIVATION_BYTES


def serve(
    engine: LocalEngine, folders: Sequence[Path], *, num_rounds: int = 6, **request: Any
) -> list[list[int]]:
    """The tokens of requests with shared beginnings, for the base and every adapter, some at once,
    each adapter again and again."""
    keys: list[AdapterKey | None] = [None, *(engine.add_adapter(folder) for folder in folders)]
    rng = random.Random(0)
    tokens = []
    for _ in range(num_rounds):
        names = [
            engine.submit(
                [*SHARED[: rng.choice((16, 33, 40))], rng.randrange(90)],
                rng.choice(keys),
                max_tokens=12,
                ignore_eos=True,
                **request,
            )
            for _ in range(8)
        ]
        engine.run()
        tokens += [engine.answers[name].token_ids for name in names]
    return tokens


def between_the_sides(arena: Arena, cache: KvCache, num_usable: int) -> Tensor:
    """The bytes of a divided memory that neither the usable blocks nor adapters have."""
    memory = cache._block_memory
    assert memory is not None
    end = (1 + num_usable) * memory._block_bytes
    free = (arena.reserved - arena.capacity) * arena.element_bytes
    start = arena.flat.data_ptr() - memory._memory.data_ptr() + free
    assert start >= end
    return memory._memory[end:start]
