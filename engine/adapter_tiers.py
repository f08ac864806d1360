"""The adapter tiers that the engine owns: the arena and host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..adapters.arena import Arena
from ..adapters.draft_head import DraftHeadForm
from ..adapters.host_cache import HostCache, host_memory
from ..adapters.layout_part import LayoutPart
from ..adapters.loaders import LoaderThreads, Pace
from ..adapters.manager import AdapterManager
from .config import EngineConfig
from .kv.host_blocks import SlotMemory
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
    slot_memory: SlotMemory | None
    """Host memory that adapters share with KV blocks; None: each has its own."""

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
    draft_heads: DraftHeadForm | None = None,
    memory: Tensor | None = None,
) -> AdapterTiers:
    """Allocate the tiers as planned and attach the arena to the base.

    `followers`: the other ranks of a group, whose tiers do the same. `draft_heads`: those that are
    loaded with their adapters; None: none are. `memory`: in which the arena is, see `Arena`.
    """
    pace = Pace(choose_duty(base.device) if config.loader_duty is None else config.loader_duty)
    arena = _open_arena(base, plan, pace, followers, memory)
    base.attach_arena(arena)
    loaders = LoaderThreads(config.num_loader_threads)
    shared = _open_shared_memory(base, plan)
    host = _open_host(plan, base, pace, followers, shared, draft_heads)
    manager = AdapterManager(
        arena=arena,
        host=host,
        loaders=loaders,
        clock=clock,
        num_soon=config.max_num_seqs,
    )
    slots = None
    if shared is not None and plan.host.shared is not None:
        slots = SlotMemory(plan.host.shared.group, shared)
    return AdapterTiers(arena, host, manager, pace, loaders, slots)


def _open_arena(
    base: BaseModel,
    plan: MemoryPlan,
    pace: Pace,
    followers: Followers | None,
    memory: Tensor | None,
) -> Arena:
    layout, num_bytes = base.part.layout, plan.arena_bytes
    make = Arena if followers is None else partial(LeaderArena, followers)
    return make(
        *(layout, num_bytes, base.dtype, base.device),
        pace=pace,
        reserved_bytes=plan.border.most_adapters if plan.border else 0,
        memory=memory,
    )


def _open_shared_memory(base: BaseModel, plan: MemoryPlan) -> Tensor | None:
    """The memory of adapters and KV blocks, uint8; None: each has its own."""
    if plan.host.shared is None:
        return None
    is_cuda = base.device.type == "cuda"
    return host_memory(plan.host.shared.bounds.total, torch.uint8, page_locked=is_cuda)


def _open_host(
    plan: MemoryPlan,
    base: BaseModel,
    pace: Pace,
    followers: Followers | None,
    shared: Tensor | None,
    draft_heads: DraftHeadForm | None,
) -> HostCache:
    layout = base.part.layout
    prepare = BlockPreparation(layout, base.extended, partial=base.partial)
    num_bytes, page_locked = plan.host.adapter_bytes, base.device.type == "cuda"
    if followers is None:
        return HostCache(
            base.layout,
            num_bytes,
            base.dtype,
            page_locked=page_locked,
            prepare=prepare,
            pace=pace,
            part=LayoutPart(base.layout, draft_heads=draft_heads),
            memory=_adapters_part(plan, shared),
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


def _adapters_part(plan: MemoryPlan, shared: Tensor | None) -> Tensor | None:
    """What adapters can have of the shared memory at most."""
    if shared is None or plan.host.shared is None:
        return None
    return shared[: plan.host.shared.bounds.most_adapters]
