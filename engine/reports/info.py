"""The report of an engine that has become ready."""

from __future__ import annotations

from ..checkpoint.files import locate_base
from ..config import EngineConfig, GenerationConfig, KvDtype
from ..generation_defaults import GenerationDefaults, read_generation_defaults
from ..handover.shared_pages import memory_domain
from ..kv.eviction import eviction_obstacle
from ..memory.kv_demands import kv_groups
from ..memory.plan import MemoryPlan
from ..messages import EngineInfo, LatencyTargets
from ..model.base_model import BaseModel, num_query_heads
from ..model.endless import endless_obstacle
from ..runtime_id import served_runtime_id


def describe_engine(
    config: EngineConfig, base: BaseModel, plan: MemoryPlan, *, serves_grammars: bool
) -> EngineInfo:
    dtype = str(base.dtype).removeprefix("torch.")
    ends = base.packed_ends
    return EngineInfo(
        base_id=base.layout.base_id,
        runtime_id=served_runtime_id(config, base),
        layout=base.layout,
        model_type=base.config.model_type,
        num_parameters=base.num_parameters,
        vocab_size=base.vocab_size,
        max_model_len=plan.max_model_len,
        device=str(base.device),
        dtype=dtype,
        quantization=base.quantization,
        embedding_format=ends.served_table.format,
        embedding_bytes=ends.served_table.num_bytes,
        head_format=ends.served_head.format,
        head_bytes=ends.served_head.num_bytes,
        num_kv_blocks=plan.num_kv_blocks,
        kv_block_size=config.kv_block_size,
        arena_bytes=plan.arena_bytes,
        host_cache_bytes=plan.host.adapter_bytes,
        max_num_seqs=config.max_num_seqs,
        memory_plan=plan.lines,
        proposers=[] if base.has_states else config.proposers,
        max_draft_tokens=config.max_draft_tokens,
        acceptance=config.acceptance,
        generation_defaults=_generation_defaults(config),
        latency_targets=LatencyTargets.of_ms(config.target_ttft_ms, config.target_itl_ms),
        serves_grammars=serves_grammars,
        kv_policy_obstacle=_kv_policy_obstacle(config, base, plan),
        endless_obstacle=_endless_obstacle(config, base, plan),
        memory_domain=memory_domain(),
        embedding_size=base.embedding_size,
        weight_bytes=base.weight_bytes * config.num_ranks,
        num_query_heads=num_query_heads(base.config),
    )


def _generation_defaults(config: EngineConfig) -> GenerationDefaults:
    if config.generation_config == GenerationConfig.NONE:
        return GenerationDefaults()
    return read_generation_defaults(locate_base(config.model))


def _kv_policy_obstacle(config: EngineConfig, base: BaseModel, plan: MemoryPlan) -> str | None:
    quantizes_blocks = KvDtype(config.kv_dtype).quantizes_blocks
    return eviction_obstacle(plan.kv_groups, base.kv_shapes, quantizes_blocks=quantizes_blocks)


def _endless_obstacle(config: EngineConfig, base: BaseModel, plan: MemoryPlan) -> str | None:
    if base.rotary_contexts.has_tables:
        return "the rotary frequencies of this base depend on the length"
    shapes = base.stages.all_kv_shapes
    return endless_obstacle(
        base.config,
        kv_groups(config, shapes, max_model_len=base.max_model_len),
        shapes,
        max_model_len=plan.max_model_len,
        block_size=config.kv_block_size,
    )
