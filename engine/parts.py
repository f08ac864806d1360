"""The parts of an engine, opened from its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from .adapter_tiers import AdapterTiers, open_adapter_tiers
from .checkpoint.files import locate_base
from .config import EngineConfig
from .errors import InvalidParameter
from .execution.cpu_threads import CpuThreads, open_cpu_threads
from .execution.decode_graphs import open_decode_graphs, serves_graphs
from .execution.grammars import Grammars, open_grammars
from .execution.profiling import plan_engine
from .execution.runner import ModelRunner
from .kv.block_memory import BlockMemory
from .kv.blocks import KvBlocks
from .kv.cache import KvCache
from .kv.layout import STATE_WINDOW
from .kv.tier_key import hash_secret, new_tier_key
from .memory.border import Border
from .memory.device_peak import measure_peak
from .memory.divided_memory import open_divided_memory
from .memory.host_border import HostBorder
from .memory.model_cost import model_cost
from .memory.plan import MemoryPlan
from .memory.utilization import KvReads, ModelCost, Utilization
from .memory.weights_room import check_weights_fit
from .messages import LatencyTargets
from .model.base_model import BaseModel, weight_format
from .model.load_quantization import LoadQuantization
from .model.rounded_linears import rounded_format
from .model.sharded_base import load_sharded_base
from .model.whole_base import load_base_model
from .ranks.commands import OpenPools
from .ranks.leader_kv_cache import LeaderKvCache
from .ranks.leader_runner import LeaderRunner
from .ranks.rank_group import RankGroup, open_group
from .ranks.rank_threads import threads_per_rank
from .runtime_id import served_runtime_id
from .scheduling.scheduler import Scheduler, SchedulerLimits
from .scheduling.step_costs import StepCosts
from .speculation.draft_loading import load_draft_model
from .speculation.draft_model_opening import open_draft_model
from .speculation.eagle import LoadedEagle, load_eagle
from .speculation.medusa import MedusaProposer, heads_bytes, open_medusas
from .speculation.mtp import load_mtp
from .speculation.proposer import Proposer
from .speculation.speculation import Speculation, open_speculation

if TYPE_CHECKING:
    from .kv.disk_store import DiskStore


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine, loaded and connected."""

    config: EngineConfig
    clock: Callable[[], float]
    base: BaseModel
    models: tuple[BaseModel, ...]
    """The base, and the draft model if there is one."""
    plan: MemoryPlan
    grammars: Grammars
    tiers: AdapterTiers
    kv: KvBlocks
    runner: ModelRunner
    speculation: Speculation
    scheduler: Scheduler
    border: Border | None
    """Moves memory between KV cache and arena; None: the border is fixed."""
    host_border: HostBorder | None
    """Moves host memory between adapters and KV blocks; None: the border is fixed."""
    cost: ModelCost
    costs: StepCosts
    """Bytes and operations of a step."""
    utilization: Utilization
    cpu_threads: CpuThreads
    is_async: bool
    """Whether a step may be in flight while the next one is scheduled."""
    group: RankGroup | None
    """The ranks that serve the base together; None: this process alone does."""
    disk: DiskStore | None
    """Where cached prefixes are written to; None: nowhere."""


def open_parts(
    config: EngineConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    base_id: str | None = None,
    prefix_key: bytes | None = None,
) -> EngineParts:
    """Load the model and size the pools. Raises EngineError if that is impossible.

    base_id: to which the base's adapters are bound, if not to its files. prefix_key: of the
    prefixes on disk, 32 bytes; None: what an earlier engine has written is not read.
    """
    if config.num_ranks == 1:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        return _open_parts(config, None, clock, base_id, prefix_key or new_tier_key())
    if config.prefix_disk_bytes:  # each rank has a part of every block
        raise InvalidParameter("prefix_disk_bytes", config.ranks_obstacle)
    group = open_group(config)
    torch.set_num_threads(threads_per_rank(config, group.num_ranks_here))
    try:
        parts = _open_parts(config, group, clock, base_id, new_tier_key())
    except BaseException:
        group.followers.close()
        raise
    group.watch.start()
    return parts


def _open_parts(
    config: EngineConfig,
    group: RankGroup | None,
    clock: Callable[[], float],
    base_id: str | None,
    prefix_key: bytes,
) -> EngineParts:
    """`group`: the ranks that serve the base together; None: this process alone does."""
    followers = None if group is None else group.followers
    loaded = _load(config, base_id, group)
    base = loaded.base
    plan = plan_engine(
        config,
        base,
        loaded.draft,
        head_bytes=heads_bytes(loaded.medusas),
        eagle=None if loaded.eagle is None else loaded.eagle.demand(config),
        ranks=None if group is None else group.links.sums,
        num_ranks_here=1 if group is None else group.most_ranks_on_a_host,
    )
    if followers:
        followers.tell(
            OpenPools(
                base.layout.base_id,
                plan.kv_groups,
                plan.host.num_slots,
                plan.num_open_slots,
                plan.kv_block_bytes,
                plan.arena_bytes,
                plan.border,
                plan.max_model_len,
            )
        )
    grammars = open_grammars(
        locate_base(config.model), vocab_size=base.vocab_size, eos_token_ids=base.eos_token_ids
    )
    utilization = _open_utilization(config, base)
    memory = open_divided_memory(
        plan.border,
        plan.kv_groups,
        plan.kv_block_bytes,
        has_spare_block=serves_graphs(config, base),
        device=base.device,
    )
    tiers = open_adapter_tiers(
        config,
        base,
        plan,
        clock=clock,
        followers=followers,
        draft_heads=loaded.eagle.adapter_form(config) if loaded.eagle else None,
        memory=None if memory is None else memory.arena,
    )
    runner = _open_runner(
        config, base, plan, tiers, group, blocks=None if memory is None else memory.blocks
    )
    kv = KvBlocks(
        plan.kv_groups,
        config.kv_block_size,
        prefix_secret=hash_secret(prefix_key) if config.prefix_caching else None,
        num_swap_slots=plan.host.num_slots,
        num_open_slots=plan.num_open_slots,
        tenant_cap=config.tenant_cap,
        clock=clock,
    )
    disk: DiskStore | None = None
    if config.prefix_disk_bytes:
        from .prefix_disk import open_prefix_disk  # here: it needs `cryptography`

        disk = open_prefix_disk(
            config,
            plan,
            kv,
            runner.cache,
            runtime_id=served_runtime_id(config, base),
            tier_key=prefix_key,
            pace=tiers.pace,
        )
    costs = StepCosts(max_graph_rows=runner.max_graph_rows)
    speculation = _open_speculation(config, loaded, plan, tiers, runner, costs, clock)
    plan.lines.extend(runner.capture())
    scheduler = Scheduler(
        _limits(config, plan),
        kv=kv,
        manager=tiers.manager,
        costs=costs,
        clock=clock,
        drafts=speculation,
    )
    return EngineParts(
        config=config,
        clock=clock,
        base=base,
        models=loaded.models,
        plan=plan,
        grammars=grammars,
        tiers=tiers,
        kv=kv,
        runner=runner,
        speculation=speculation,
        scheduler=scheduler,
        border=_open_border(config, plan, kv, tiers, scheduler, costs, clock, runner),
        host_border=_open_host_border(config, plan, kv, tiers, costs, clock),
        cost=model_cost(base, _kv_reads(config, base, plan)),
        costs=costs,
        utilization=utilization,
        cpu_threads=open_cpu_threads(base.device, clock()),
        is_async=_is_async(config, base, speculation),
        group=group,
        disk=disk,
    )


class _Loaded(NamedTuple):
    """Everything that is loaded before the remaining memory is divided."""

    base: BaseModel
    draft: BaseModel | None
    medusas: Sequence[MedusaProposer]
    eagle: LoadedEagle | None

    @property
    def models(self) -> tuple[BaseModel, ...]:
        return (self.base,) if self.draft is None else (self.base, self.draft)


def _load(config: EngineConfig, base_id: str | None, group: RankGroup | None) -> _Loaded:
    if group is not None:
        base = load_sharded_base(config, group.links, base_id=base_id)
    else:
        base = load_base_model(
            config,
            base_id=base_id,
            check_room=partial(check_weights_fit, config),
            rounded=rounded_format(config),
        )
    return _Loaded(
        base,
        load_draft_model(config, base),
        open_medusas(config, base),
        load_eagle(config, base) or load_mtp(config, base),
    )


def _open_utilization(config: EngineConfig, base: BaseModel) -> Utilization:
    peak = measure_peak(
        base.device,
        base.dtype,
        quantization=LoadQuantization(
            weight_format(config.quantization), config.quantization_group_size
        ),
        threads=torch.get_num_threads(),
    )
    return Utilization(peak)


def _moving_group(plan: MemoryPlan) -> int:
    """The index of the KV group whose blocks come and go; there is one if the border moves."""
    (index,) = (index for index, group in enumerate(plan.kv_groups) if group.may_move)
    return index


def _open_runner(
    config: EngineConfig,
    base: BaseModel,
    plan: MemoryPlan,
    tiers: AdapterTiers,
    group: RankGroup | None,
    *,
    blocks: BlockMemory | None,
) -> ModelRunner:
    captures = serves_graphs(config, base)
    if group is None:
        cache = KvCache(
            plan.kv_groups,
            base.kv_shapes,
            block_size=config.kv_block_size,
            kv_format=base.kv_format,
            device=base.device,
            num_swap_slots=plan.host.num_slots,
            slot_memory=tiers.slot_memory,
            block_memory=blocks,
            has_spare_blocks=captures,
            num_open_slots=plan.num_open_slots,
        )
        graphs = open_decode_graphs(
            config, base, cache, tiers.arena, max_model_len=plan.max_model_len
        )
        return ModelRunner(base, cache, tiers.arena, graphs)
    leader = LeaderKvCache(
        group.followers,
        plan.kv_groups,
        base.kv_shapes,
        block_size=config.kv_block_size,
        kv_format=base.kv_format,
        device=base.device,
        num_swap_slots=plan.host.num_slots,
        has_stages=config.pipeline_parallel_size > 1,
        block_memory=blocks,
        has_spare_blocks=captures,
        num_open_slots=plan.num_open_slots,
    )
    graphs = open_decode_graphs(
        config, base, leader, tiers.arena, max_model_len=plan.max_model_len, is_shared=True
    )
    return LeaderRunner(group.followers, group.links.sums, base, leader, tiers.arena, graphs)


def _open_speculation(
    config: EngineConfig,
    loaded: _Loaded,
    plan: MemoryPlan,
    tiers: AdapterTiers,
    runner: ModelRunner,
    costs: StepCosts,
    clock: Callable[[], float],
) -> Speculation:
    drafting = open_draft_model(
        config,
        loaded.draft,
        num_blocks=plan.num_draft_blocks,
        max_model_len=plan.max_model_len,
    )
    if drafting:
        plan.lines.extend(drafting.capture())
    proposers: list[Proposer] = [*loaded.medusas]
    if drafting:
        proposers.append(drafting)
    if loaded.eagle:
        eagle = loaded.eagle.open(
            config,
            tiers.arena,
            num_blocks=plan.num_draft_blocks,
            max_model_len=plan.max_model_len,
        )
        plan.lines.extend(eagle.capture())
        proposers.append(eagle)
    return open_speculation(
        config,
        base=loaded.base,
        runner=runner,
        costs=costs,
        clock=clock,
        loaded=proposers,
    )


def _open_border(
    config: EngineConfig,
    plan: MemoryPlan,
    kv: KvBlocks,
    tiers: AdapterTiers,
    scheduler: Scheduler,
    costs: StepCosts,
    clock: Callable[[], float],
    runner: ModelRunner,
) -> Border | None:
    if plan.border is None:
        return None
    return Border(
        plan.border,
        kv=kv,
        block_bytes=plan.kv_block_bytes[_moving_group(plan)],
        block_size=config.kv_block_size,
        manager=tiers.manager,
        scheduler=scheduler,
        costs=costs,
        clock=clock,
        execute=runner.cache.execute,
        num_given_back=lambda: runner.cache.num_given_back,
    )


def _open_host_border(
    config: EngineConfig,
    plan: MemoryPlan,
    kv: KvBlocks,
    tiers: AdapterTiers,
    costs: StepCosts,
    clock: Callable[[], float],
) -> HostBorder | None:
    if plan.host.shared is None:
        return None
    return HostBorder(
        plan.host.shared,
        adapter_bytes=plan.host.adapter_bytes,
        kv=kv,
        block_size=config.kv_block_size,
        manager=tiers.manager,
        costs=costs,
        clock=clock,
    )


def _is_async(config: EngineConfig, base: BaseModel, speculation: Speculation) -> bool:
    """A step's hidden states, which some proposers need, are overwritten by the next step."""
    if speculation.needs_hidden_states or speculation.features:
        return False
    if config.async_scheduling is not None:
        return config.async_scheduling
    return base.device.type == "cuda"  # on the CPU nothing runs beside the host


def _limits(config: EngineConfig, plan: MemoryPlan) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=config.kv_block_size,
        targets=LatencyTargets.of_ms(config.target_ttft_ms, config.target_itl_ms),
        max_queued=config.max_queued,
        max_queued_per_tenant=config.max_queued_per_tenant,
        tenant_cap=config.tenant_cap,
        max_concurrent_batches=config.pipeline_parallel_size,
        kv_block_bytes=plan.kv_block_bytes,
    )


def _kv_reads(config: EngineConfig, base: BaseModel, plan: MemoryPlan) -> tuple[KvReads, ...]:
    """What a query reads of the cache, by KV group."""
    return tuple(
        # States are read and written once, whatever the length: two tokens' worth.
        KvReads(num_bytes, STATE_WINDOW)
        if group.holds_states
        else KvReads(num_bytes // config.kv_block_size, group.window, group.sinks)
        for group, num_bytes in zip(plan.kv_groups, plan.kv_block_bytes, strict=True)
    )
