"""The adapter tiers that the engine owns: the arena and host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..adapters.arena import Arena
from ..adapters.host_cache import HostCache
from ..adapters.loaders import LoaderThreads, Pace
from ..adapters.manager import AdapterManager
from .config import EngineConfig
from .memory.loader_duty import choose_duty
from .memory.plan import MemoryPlan
from .model.base_model import BaseModel
from .model.block_preparation import BlockPreparation


@dataclass(frozen=True, slots=True)
class AdapterTiers:
    """The arena, the adapter manager and its loader threads."""

    arena: Arena
    manager: AdapterManager[Any]
    pace: Pace
    """Limits the loader threads' share of a core while steps run."""
    loaders: LoaderThreads

    def close(self) -> None:
        """Stop the loader threads."""
        self.pace.is_busy = False
        self.loaders.close()


def open_adapter_tiers(
    config: EngineConfig,
    base: BaseModel,
    plan: MemoryPlan,
    *,
    clock: Callable[[], float],
) -> AdapterTiers:
    """Allocate the tiers as planned and attach the arena to the base."""
    pace = Pace(choose_duty(base.device) if config.loader_duty is None else config.loader_duty)
    arena = Arena(
        base.part.layout,
        plan.arena_bytes,
        base.dtype,
        base.device,
        pace=pace,
    )
    base.attach_arena(arena)
    host = HostCache(
        base.layout,
        config.host_cache_bytes,
        base.dtype,
        page_locked=base.device.type == "cuda",
        pace=pace,
        prepare=BlockPreparation(base.part.layout, base.extended),
        part=base.part,
    )
    loaders = LoaderThreads(config.num_loader_threads)
    manager = AdapterManager(
        arena=arena,
        host=host,
        loaders=loaders,
        clock=clock,
        num_soon=config.max_num_seqs,
    )
    return AdapterTiers(arena, manager, pace, loaders)
