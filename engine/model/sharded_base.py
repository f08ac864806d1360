"""Loads one rank's part of a base that is divided among the ranks of a group.

All ranks load at the same time, each from the base's files. The linear layers, the experts and the
ends stay in the files until they are cut, so a rank never holds more than its part and one layer.
Rank 0 computes the dense reference of the whole base, layer by layer from the files. Then all ranks
run the divided base together, and rank 0 compares. The checks that run the divided base are the
same on every rank and in the same order, because each forward pass exchanges results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ...adapters.layout_part import LayoutPart
from ...adapters.malloc import large_blocks_mapped, return_freed_memory
from ...kernels.linear_packing import prefers_bytes
from ..checkpoint.base_config import read_config_file
from ..checkpoint.base_identity import compute_base_id
from ..checkpoint.text_part import is_composite
from ..checkpoint.weight_digests import end_digests
from ..checkpoint.weights import load_weights, transformers_quiet
from ..config import EngineConfig
from ..errors import UnsupportedModel
from ..kv.groups import LayerKvShape
from ..shards.group_links import GroupLinks
from ..shards.rank_place import StagePlace
from ..shards.rank_sums import RankSums
from ..shards.shard_plan import Shard, ShardPlan
from ..shards.shared_heads import find_shared_heads
from ..shards.stage_links import StageLinks
from ..shards.stage_plan import StagePlan
from ..shards.vocabulary_plan import VocabularyPart
from .admission import References, check_replaced, probe_kv_shapes
from .base_model import (
    BaseModel,
    decoder_linears,
    describe_layout,
    eos_token_ids,
    module_order,
    replace_linears,
    sibling_groups,
    whole_projection,
)
from .base_stages import BaseStages, tell_shapes
from .divided_ends import cut_ends, join_ends, parts_of_ranks, plan_vocabulary
from .embedding_and_head import ModelEnds, adapt_ends
from .expert_shards import ExpertShards
from .experts import (
    MoeLayer,
    experts_parameters,
    pack_moe_layers,
    replace_experts,
)
from .forward import ATTENTION_NAME
from .fused_layers import FusedLayers, fuse_layers, fuses_layers
from .group_self_test import check_together, kv_error_together, largest_of_group
from .head_parameters import cut_head_parameters
from .latent_attention import replace_latents
from .linear import FusedProjection
from .linear_shards import LinearShards
from .load_settings import LoadSettings
from .packed_ends import PackedEnds, model_ends, pack_ends
from .parity_bound import parity_bound
from .part_plan import plan_part
from .rotary_tables import table_rotary
from .rounded_linears import rounded_format
from .row_matrix import leave_as_rows, read_whole
from .stage_layers import (
    StandIns,
    cut_stage,
    ends_of_stage,
    held_linears,
    parts_of_stages,
    plan_stages,
    without_layers,
)
from .threshold_test import check_thresholds
from .whole_experts import whole_experts
from .whole_layers import whole_layers


class _Division(NamedTuple):
    """Which part of the base this rank gets."""

    links: GroupLinks
    plan: ShardPlan
    shards: LinearShards
    stage_plan: StagePlan
    absorbed: Collection[str]
    """The projections of latent attention, which stay dense."""

    @property
    def ranks(self) -> RankSums:
        return self.links.sums

    @property
    def stages(self) -> StageLinks | None:
        return self.links.stages

    @property
    def is_first(self) -> bool:
        """Whether this rank is the engine's process, which has the logits."""
        return self.ranks.place.rank == 0 and (self.stages is None or self.stages.place.is_last)

    @property
    def stage(self) -> StagePlace:
        return self.stages.place if self.stages else StagePlace(0, 1)

    @property
    def stage_linears(self) -> dict[str, Shard]:
        """The divided layers of this rank's stage."""
        return held_linears(self.plan.linears, self.stage_plan, self.stages)


class _Parts(NamedTuple):
    """What adapters can change in the whole base, before its linear layers are cut."""

    of_ranks: tuple[tuple[LayoutPart, ...], ...]
    """What each rank holds, by stage and rank."""
    vocabulary: tuple[VocabularyPart, ...]
    """Of each rank; empty if the ends are whole on all."""
    ends: ModelEnds
    """With this rank's tokens."""
    moe_layers: list[MoeLayer]
    stand_ins: StandIns
    num_parameters: int


class _Held(NamedTuple):
    """This rank's part, packed."""

    ends: ModelEnds
    packed_ends: PackedEnds
    moe_layers: list[MoeLayer]
    projections: list[FusedProjection]
    rotary_bytes: int
    kv_shapes: list[LayerKvShape]
    stages: BaseStages
    fused: FusedLayers | None

    @property
    def packed(self) -> list[object]:
        """The packed layers, as `parity_bound` takes them."""
        layers = [part for each in self.projections for part in each.linear.modules()]
        experts = [part.weight for layer in self.moe_layers for part in layer.experts]
        return [*layers, *self.packed_ends.linears, *experts]


class _Results(NamedTuple):
    """Of the self-tests."""

    bound: float
    """Of all ranks of all stages."""
    error: float
    """On rank 0, as the next."""
    kv_error: float


def load_sharded_base(
    engine: EngineConfig, links: GroupLinks, *, base_id: str | None = None
) -> BaseModel:
    """Load this rank's part, together with all other ranks.

    base_id: to which adapters are bound, if not to the files. Rank 0 alone hashes the files: the
    layout of the others has no base id until rank 0 has told it. Raises UnsupportedModel with the
    reason if the base cannot be divided, or if the divided base computes something else.
    """
    with large_blocks_mapped():
        settings = LoadSettings.of(engine, rounded=rounded_format(engine))
        model = _read(settings)
        division = _divide(model, settings, links)
        references = _compute_references(model, settings, division)
        parts = _find_parts(model, settings, division, base_id)
        held = _hold_part(model, settings, division, parts)
        results = _check(model, settings, division, held, references)
        base = _assemble(model, settings, division, parts, held, results)
    if links.stages:
        base.call_between_layers(links.pulse.pass_layer)
    return base


def _read(settings: LoadSettings) -> PreTrainedModel:
    """The model, whose linear layers, experts and ends stay in the files."""
    model = load_weights(
        settings.model_dir,
        settings.config,
        settings.dtype,
        settings.device,
        left_stored=decoder_linears,
        left_experts=experts_parameters,
        left_rows=model_ends,
    )
    leave_as_rows(model_ends(model).values(), settings.device)
    return model


def _divide(model: PreTrainedModel, settings: LoadSettings, links: GroupLinks) -> _Division:
    """Raises UnsupportedModel if the base cannot be divided."""
    config = settings.config
    plan = plan_part(
        model,
        config,
        links.sums.place,
        is_staged=links.stages is not None,
        needs_experts=settings.engine.enable_expert_parallel,
    )
    multiplies_bytes = _all_multiply_bytes(links.sums)
    shards = LinearShards(plan.linears, links.sums, multiplies_bytes=multiplies_bytes)
    num_stages = links.stages.place.num_stages if links.stages else 1
    stage_plan = plan_stages(model, config, num_stages)
    return _Division(links, plan, shards, stage_plan, replace_latents(model))


def _all_multiply_bytes(ranks: RankSums) -> bool:
    """Whether every rank prefers products of bytes, for which they exchange other numbers."""
    measured = torch.tensor([prefers_bytes()], dtype=torch.int32, device=ranks.device)
    return bool(torch.cat(ranks.gather(measured)).all())


def _compute_references(
    model: PreTrainedModel, settings: LoadSettings, division: _Division
) -> References:
    """What the whole base computes, read layer by layer; nothing on the other ranks."""
    if not division.is_first:
        return References([], [])
    linears = decoder_linears(model)
    packed_linears = {path: linears[path] for path in linears.keys() - set(division.absorbed)}
    with (
        whole_experts(model, settings.quantization),
        whole_layers(
            model,
            packed_linears,
            settings.quantization,
            settings.ends_format,
            multiplies_bytes=division.shards.multiplies_bytes,
        ),
    ):
        return References.of(model, settings.config.vocab_size, settings.kv_test)


def _find_parts(
    model: PreTrainedModel, settings: LoadSettings, division: _Division, base_id: str | None
) -> _Parts:
    """Replace the experts and the attention, and describe what adapters can change."""
    order, num_parameters = module_order(model), sum(each.numel() for each in model.parameters())
    linears = decoder_linears(model)
    wholes = [
        whole_projection([(path, linears[path]) for path in group])
        for group in sibling_groups(linears)
    ]
    moe_layers = replace_experts(model, ExpertShards(division.plan.experts, division.ranks))
    with transformers_quiet():  # it remarks on families that compute attention themselves
        model.set_attn_implementation(ATTENTION_NAME)
    with without_layers(model, division.stage_plan) as stand_ins:
        ends = adapt_ends(model)
    layout = describe_layout(
        model,
        order,
        ends=ends,
        linears=wholes,
        moe_layers=moe_layers,
        base_id=base_id or (compute_base_id(settings.model_dir) if division.is_first else ""),
        digests=end_digests(model, settings.model_dir) if division.is_first else {},
        is_text_part=is_composite(read_config_file(settings.model_dir)),
    )
    part = LayoutPart(layout, division.shards.ranges, _held_experts(moe_layers))
    place = division.ranks.place
    vocabulary = plan_vocabulary(ends, place.size)
    of_ranks = [
        parts_of_stages(each, division.stage_plan)
        for each in parts_of_ranks(part, vocabulary, place.size)
    ]
    if vocabulary:
        ends = cut_ends(model, ends, vocabulary[place.rank])
    return _Parts(
        tuple(zip(*of_ranks, strict=True)),
        vocabulary,
        ends,
        moe_layers,
        stand_ins,
        num_parameters,
    )


def _held_experts(moe_layers: Sequence[MoeLayer]) -> dict[str, range]:
    """This rank's experts, by the names of their slices."""
    parts = [part for layer in moe_layers for part in layer.experts]
    return {part.whole.slices[0].name: part.held for part in parts}


def _hold_part(
    model: PreTrainedModel, settings: LoadSettings, division: _Division, parts: _Parts
) -> _Held:
    """Leave this stage's layers, and cut and pack this rank's part of each."""
    ends, moe_layers = _leave_stage(model, settings, division, parts)
    packed_ends = pack_ends(model, ends, settings.ends_format)
    read_whole(model_ends(model).values())
    if parts.vocabulary:
        join_ends(model, ends, parts.vocabulary, division.ranks)
    return_freed_memory()
    projections = replace_linears(
        model,
        quantization=settings.quantization,
        kept_dense=division.absorbed,
        shards=division.shards,
        rounded=settings.rounded,
    )
    pack_moe_layers(moe_layers, settings.quantization, settings.rounded)
    cut_head_parameters(model, division.stage_linears, division.ranks.place)
    rotary_bytes = table_rotary(
        model, settings.contexts, dtype=settings.dtype, device=settings.device
    )
    kv_shapes = _divided_kv_shapes(model, settings, division)
    shapes = tell_shapes(kv_shapes, division.stages) if division.stages else (kv_shapes,)
    return_freed_memory()
    check_replaced(model, settings.config)
    return _Held(
        ends,
        packed_ends,
        moe_layers,
        projections,
        rotary_bytes,
        kv_shapes,
        BaseStages(division.stage, division.ranks.place.rank, parts.of_ranks, shapes),
        fuse_layers(model) if fuses_layers(settings.device) else None,
    )


def _leave_stage(
    model: PreTrainedModel, settings: LoadSettings, division: _Division, parts: _Parts
) -> tuple[ModelEnds, list[MoeLayer]]:
    """Replace the layers of other stages. Returns the ends and the MoE layers that are left."""
    stages, plan = division.stages, division.stage_plan
    if stages is None:
        return parts.ends, parts.moe_layers
    cut_stage(model, plan, stages, parts.stand_ins)
    own = plan.layers(stages.place.stage)
    moe_layers = [layer for layer in parts.moe_layers if plan.layer_of(layer.path) in own]
    return ends_of_stage(parts.ends, stages), moe_layers


def _divided_kv_shapes(
    model: PreTrainedModel, settings: LoadSettings, division: _Division
) -> list[LayerKvShape]:
    """What each layer of this rank caches. Every rank of a stage meets the same error."""
    stages, config = division.stages, settings.config
    layers = division.stage_plan.layers(stages.place.stage) if stages else None
    try:
        return probe_kv_shapes(model, config, max_model_len=settings.max_model_len, layers=layers)
    except RuntimeError as exc:
        raise UnsupportedModel(
            f"{config.model_type} cannot be divided among {division.ranks.place.size} ranks: {exc}"
        ) from exc


def _check(
    model: PreTrainedModel,
    settings: LoadSettings,
    division: _Division,
    held: _Held,
    references: References,
) -> _Results:
    """Run the self-tests with all ranks. Raises UnsupportedModel."""
    config, shapes = settings.config, held.kv_shapes
    # Ranks may hold experts of different forms, and stages layers.
    bound = largest_of_group(parity_bound(settings.dtype, held.packed), division.links)
    error = check_together(model, config, shapes, references.plain, bound, division.links)
    kv_error = kv_error_together(
        model, config, shapes, references.of_kv, settings.kv_format, settings.kv_test
    )
    if division.is_first:
        check_thresholds(config, held.stages.all_kv_shapes, max_model_len=settings.max_model_len)
    return _Results(bound, error, kv_error)


def _assemble(
    model: PreTrainedModel,
    settings: LoadSettings,
    division: _Division,
    parts: _Parts,
    held: _Held,
    results: _Results,
) -> BaseModel:
    config = settings.config
    return BaseModel(
        model=model,
        config=config,
        part=held.stages.part,
        projections=tuple(held.projections),
        ends=held.ends,
        packed_ends=held.packed_ends,
        moe_layers=tuple(held.moe_layers),
        absorbed=tuple(division.absorbed),
        fused=held.fused,
        kv_shapes=held.kv_shapes,
        stages=held.stages,
        kv_format=settings.kv_format,
        eos_token_ids=eos_token_ids(settings.model_dir, config),
        max_model_len=settings.max_model_len,
        rotary_contexts=settings.contexts,
        rotary_bytes=held.rotary_bytes,
        dtype=settings.dtype,
        device=settings.device,
        num_parameters=parts.num_parameters,
        quantization=settings.stored_format or settings.quantization.name,
        self_test_error=results.error,
        kv_error=results.kv_error,
        self_test_bound=results.bound,
        shared_heads=find_shared_heads(config, division.plan.linears, division.ranks),
    )
