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
from .model.row_magnitudes import RowMagnitudes
from .ranks.followers import Followers
from .ranks.leader_arena import LeaderArena
from .ranks.leader_host_cache import LeaderHostCache


@dataclass(frozen=True, slots=True)
class AdapterTiers:
    """The arena, the host cache, the adapter manager and its loader threads."""

    arena: Arena
    host: HostCache
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
    followers: Followers | None = None,
) -> AdapterTiers:
    """Allocate the tiers as planned and attach the arena to the base.

    `followers`: the other ranks of a group, whose tiers do the same.
    """
    pace = Pace(choose_duty(base.device) if config.loader_duty is None else config.loader_duty)
    arena = _open_arena(base, plan, pace, followers)
    base.attach_arena(arena)
    loaders = LoaderThreads(config.num_loader_threads)
    host = _open_host(config, base, pace, followers)
    manager = AdapterManager(
        arena=arena,
        host=host,
        loaders=loaders,
        clock=clock,
        num_soon=config.max_num_seqs,
    )
    return AdapterTiers(arena, host, manager, pace, loaders)


def _open_arena(
    base: BaseModel, plan: MemoryPlan, pace: Pace, followers: Followers | None
) -> Arena:
    layout, num_bytes = base.part.layout, plan.arena_bytes
    if followers is None:
        most_bytes = plan.border.most_adapters if plan.border else 0
        return Arena(
            layout, num_bytes, base.dtype, base.device, pace=pace, reserved_bytes=most_bytes
        )
    return LeaderArena(followers, layout, num_bytes, base.dtype, base.device, pace=pace)


def _open_host(
    config: EngineConfig, base: BaseModel, pace: Pace, followers: Followers | None
) -> HostCache:
    layout = base.part.layout
    prepare = BlockPreparation(layout, base.extended, partial=base.partial)
    num_bytes, page_locked = config.host_cache_bytes, base.device.type == "cuda"
    if followers is None:
        return HostCache(
            base.layout,
            num_bytes,
            base.dtype,
            page_locked=page_locked,
            prepare=prepare,
            pace=pace,
        )
    return LeaderHostCache(
        followers,
        base.stages.parts,
        num_bytes,
        base.dtype,
        page_locked=page_locked,
        prepare=prepare,
        magnitudes=RowMagnitudes(layout, base.partial),
        pace=pace,
    )
