"""Profiles the largest step and plans the engine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...kernels.cpu_library import cpu_library
from ..config import EngineConfig
from ..kv.cache import KvCache
from ..kv.groups import one_group
from ..kv.layout import KvGroup
from ..kv.sequence_blocks import block_table
from ..memory.demands import BaseDemand, EagleDemand, ProposerDemand
from ..memory.device_memory import DeviceMemory, measure_memory, peak_bytes
from ..memory.kv_budget import MIB
from ..memory.kv_demands import block_bytes, kv_demands, kv_groups
from ..memory.plan import MemoryPlan, plan_memory
from ..model.base_model import BaseModel
from ..model.forward import PagedForward, run_model
from ..model.inputs import SequenceChunk, make_inputs
from ..shards.rank_sums import RankSums
from ..tuning.devices import is_same_device
from .decode_graphs import (
    decode_layout,
    max_rows,
    serves_graphs,
)
from .graph_bytes import fixed_graph_bytes, num_captured_layers

PROFILE_CONTEXT = 8192
"""Longer contexts take proportionally more: the reserve is for them."""


def plan_engine(
    config: EngineConfig,
    base: BaseModel,
    draft: BaseModel | None = None,
    *,
    head_bytes: int = 0,
    eagle: EagleDemand | None = None,
    ranks: RankSums | None = None,
    num_ranks_here: int = 1,
) -> MemoryPlan:
    """Measure a full step and divide the remaining memory. Raises InsufficientMemory.

    `draft`: the draft model, which never runs at the same time as the base. `head_bytes`: the bytes
    of loaded Medusa heads. `eagle`: that of a loaded EAGLE head or multi-token head. `ranks`: the
    connections to those that call `profile_along` meanwhile; None: there is one rank.
    `num_ranks_here`: the ranks that share the memory of a host. Raises InvalidParameter for a
    proposer of layers that the base does not have.
    """
    num_layers = num_captured_layers(config, len(base.kv_shapes))
    groups = groups_of(config, base)
    activation_bytes = peak_bytes(base.device, lambda: profile_step(config, base, groups))
    activation_bytes += config.max_num_seqs * _state_bytes(base)
    graph_bytes = _graph_bytes(config, base, groups, num_layers, has_adapters=True)
    proposers = ProposerDemand(head_bytes=head_bytes, rounded_bytes=base.rounded_bytes)
    if eagle:
        activation_bytes += eagle.reading_bytes
        proposers = proposers._replace(
            eagle_bytes=eagle.weight_bytes,
            eagle_block_bytes=eagle.block_bytes,
            eagle_name=eagle.name,
        )
    if draft:
        draft_activation_bytes, kv_block_bytes = _profile_draft(config, draft)
        activation_bytes = max(activation_bytes, draft_activation_bytes)
        graph_bytes += _graph_bytes(
            config, draft, one_group(len(draft.kv_shapes), 2), len(draft.kv_shapes)
        )
        proposers = proposers._replace(
            model_bytes=draft.weight_bytes, kv_block_bytes=kv_block_bytes
        )
    demand = BaseDemand(
        weight_bytes=base.weight_bytes,
        activation_bytes=activation_bytes,
        kv=kv_demands(
            config,
            groups,
            base.stages.kv_shapes,
            base.kv_format,
            max_model_len=base.max_model_len,
            device_type=base.device.type,
        ),
        graph_bytes=graph_bytes,
        weight_format=base.weight_formats,
    )
    memory = measure_memory(base.device)
    if ranks:
        memory = rank_memory(memory, num_ranks_here, ranks)
    left = replace(config, trainer_bytes=_trainer_bytes(config, base.device, num_ranks_here))
    plan = plan_memory(left, memory, demand, proposers)
    if config.num_ranks > 1:
        plan.lines.insert(0, f"{_describe_group(config)}; all sizes are of each")
        if config.tensor_parallel_size > 1:
            plan.lines.append(_describe_ends(base))
        plan.lines.append(
            f"self-test: the ranks change logits by {base.self_test_error:.0e} of the largest, at "
            f"most {base.self_test_bound:.0e} is allowed"
        )
    if base.kv_format.code_dtype is not None:
        line = (
            f"KV cache in {config.kv_dtype}: changes logits by {base.kv_error:.1%} of the largest"
        )
        plan.lines.append(line)
    if base.device.type == "cpu":
        plan.lines.append(f"CPU kernels: {cpu_library().detail}")
    if base.fused:
        plan.lines.append(str(base.fused))
    if base.rotary_contexts.has_tables:
        tables = f"Their tables take {base.rotary_bytes / MIB:.1f} MiB."
        plan.lines.append(f"{base.rotary_contexts} {tables}")
    if base.has_states and config.speculation:
        plan.lines.append("no speculation: the states of this base cannot take back draft tokens")
    return plan


def _trainer_bytes(config: EngineConfig, device: torch.device, num_ranks_here: int) -> int:
    """What each rank leaves to trainers: on the host all ranks together, on CUDA the device that
    both use."""
    if not is_same_device(config.trainer_device, str(device)):
        return 0
    num_bytes = config.trainer_bytes
    return -(-num_bytes // num_ranks_here) if device.type == "cpu" else num_bytes


def groups_of(config: EngineConfig, base: BaseModel) -> tuple[KvGroup, ...]:
    """The KV groups of the layers of all stages."""
    shapes = base.stages.all_kv_shapes
    return kv_groups(config, shapes, max_model_len=base.max_model_len)


def profile_along(config: EngineConfig, base: BaseModel, ranks: RankSums) -> None:
    """A follower's part of `plan_engine`: the steps that rank 0 measures need all ranks."""
    groups = groups_of(config, base)
    profile_step(config, base, groups)
    if serves_graphs(config, base):
        _profile_graph(config, base, groups)
    rank_memory(measure_memory(base.device), 1, ranks)


def rank_memory(memory: DeviceMemory, num_ranks_here: int, ranks: RankSums) -> DeviceMemory:
    """The memory that each rank has, all having loaded their weights: an equal share of the host
    with `num_ranks_here`, else the least of all ranks' devices. `memory`: as this rank measures
    it."""
    if memory.is_host:
        return memory._replace(free_bytes=memory.free_bytes // num_ranks_here)
    free = torch.tensor([memory.free_bytes], device=ranks.device)
    return memory._replace(free_bytes=-int(ranks.largest(-free)))


def _describe_group(config: EngineConfig) -> str:
    num_stages = config.pipeline_parallel_size
    if num_stages == 1:
        return f"tensor parallelism over {config.num_ranks} ranks"
    in_each = f" of {config.tensor_parallel_size} ranks" if config.tensor_parallel_size > 1 else ""
    return f"pipeline parallelism over {num_stages} stages{in_each}"


def _describe_ends(base: BaseModel) -> str:
    """What a rank has of the vocabulary. Rank 0 has a largest part."""
    head = base.ends.head
    held = "whole on every rank"
    if head and head.is_divided:
        held = f"{head.projection.out_features:,} of {base.vocab_size:,} tokens"
    return f"embedding and output head: {held}"


def _state_bytes(base: BaseModel) -> int:
    """Of a sequence: a step keeps the new states of each until all layers have computed."""
    return sum(state.num_bytes for shape in base.kv_shapes for state in shape.states)


def _profile_draft(config: EngineConfig, draft: BaseModel) -> tuple[int, int]:
    """Bytes of the activations of the draft model's largest step, and of a block of its KV."""
    groups = one_group(len(draft.kv_shapes), 2)
    activation_bytes = peak_bytes(draft.device, lambda: profile_step(config, draft, groups))
    num_bytes = block_bytes(config, groups[0], draft.stages.kv_shapes, draft.kv_format)
    return activation_bytes, num_bytes


def profile_step(config: EngineConfig, base: BaseModel, groups: Sequence[KvGroup]) -> None:
    """Run the last chunk of a long prompt, with logits for the maximum number of rows."""
    context = min(base.max_model_len, PROFILE_CONTEXT)
    num_tokens = min(config.max_num_batched_tokens, context)
    num_rows = min(config.max_kept_rows, num_tokens)
    _run_at(context, [num_tokens], num_rows, config, base, groups)


def _graph_bytes(
    config: EngineConfig,
    base: BaseModel,
    groups: Sequence[KvGroup],
    num_layers: int,
    *,
    has_adapters: bool = False,
) -> int:
    """The activations and fixed memory of the largest captured step, and the size of the graphs; 0
    without graphs.

    The graphs of a model share their activations with each other, but not with eager steps.
    `num_layers`: those that are captured.
    """
    if not serves_graphs(config, base):
        return 0
    activations = peak_bytes(base.device, lambda: _profile_graph(config, base, groups))
    layout = decode_layout(config, base, groups, base.max_model_len)
    return activations + fixed_graph_bytes(
        config,
        layout,
        vocab_size=base.vocab_size,
        num_layers=num_layers,
        has_adapters=has_adapters,
    )


def _profile_graph(config: EngineConfig, base: BaseModel, groups: Sequence[KvGroup]) -> None:
    """Run the largest captured step, kernel by kernel."""
    context, num_rows = min(base.max_model_len, PROFILE_CONTEXT), max_rows(config)
    _run_at(context, [1] * num_rows, num_rows, config, base, groups)


def _run_at(
    context: int,
    span_lengths: Sequence[int],
    num_rows: int,
    config: EngineConfig,
    base: BaseModel,
    groups: Sequence[KvGroup],
) -> None:
    """A step of chunks that end at `context` tokens each, with logits of its first rows."""
    # One block, read again and again.
    table = block_table([1] * -(-context // config.kv_block_size))
    cache = KvCache(
        [replace(group, num_blocks=2) for group in groups],
        base.kv_shapes,
        block_size=config.kv_block_size,
        kv_format=base.kv_format,
        device=base.device,
    )
    chunks = [
        SequenceChunk([0] * length, start=context - length, tables=[table] * len(groups))
        for length in span_lengths
    ]
    inputs = make_inputs(
        chunks, groups=cache.groups, block_size=config.kv_block_size, device=base.device
    )
    rows = torch.arange(num_rows, device=base.device)
    forward = PagedForward.of(cache, inputs)
    run_model(base.model, forward, inputs.input_ids, inputs.positions, rows)
