"""Loads one rank's part of a base that is divided among the ranks of a group.

All ranks load at the same time, each from the base's files. The linear layers and the experts stay
in the files until they are cut, so a rank never holds more than its part and one layer. Rank 0
computes the dense reference of the whole base, layer by layer from the files. Then all ranks run
the divided base together, and rank 0 compares. The checks that run the divided base are the same on
every rank and in the same order, because each forward pass exchanges results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...adapters.layout_part import LayoutPart
from ...adapters.malloc import return_freed_memory
from ...kernels.linear_packing import prefers_bytes
from ..checkpoint.base_config import read_config_file
from ..checkpoint.base_identity import compute_base_id
from ..checkpoint.files import locate_base
from ..checkpoint.packed_format import find_packed_format
from ..checkpoint.text_part import is_composite
from ..checkpoint.weight_digests import end_digests
from ..checkpoint.weights import load_config, load_weights, transformers_quiet
from ..config import EngineConfig
from ..errors import UnsupportedModel
from ..kv.cache import KvFormat, choose_kv_format
from ..kv.groups import LayerKvShape
from ..shards.group_links import GroupLinks
from ..shards.rank_place import StagePlace
from ..shards.rank_sums import RankSums
from ..shards.shard_plan import LinearSize, ShardPlan, plan_shards
from ..shards.shared_heads import find_shared_heads
from ..shards.stage_plan import StagePlan
from .admission import (
    DenseCase,
    Parity,
    SelfTest,
    check_config,
    check_replaced,
    dense_reference,
    kv_self_test,
    measure_parity,
    paged_error,
    probe_kv_shapes,
    replaces_choices,
    run_paged,
    self_test_tokens,
)
from .base_model import (
    BaseModel,
    check_quantized_once,
    choose_device,
    choose_dtype,
    choose_quantization,
    decoder_linears,
    describe_layout,
    eos_token_ids,
    module_order,
    replace_linears,
    sibling_groups,
    weight_format,
    whole_projection,
)
from .base_stages import BaseStages, tell_shapes
from .embedding_and_head import adapt_ends
from .expert_choices import ReplacedChoices, choosing, of_first_rank, tell_choices
from .expert_shards import ExpertShards
from .experts import (
    MoeLayer,
    experts_parameters,
    matrices_shape,
    pack_moe_layers,
    parameter_names,
    replace_experts,
    served_experts,
)
from .forward import ATTENTION_NAME
from .fused_layers import fuse_layers, fuses_layers
from .head_parameters import cut_head_parameters
from .latent_attention import replace_latents
from .linear_shards import LinearShards
from .packed_ends import model_ends, pack_ends
from .parity_bound import parity_bound
from .rope import rotary_contexts
from .rotary_tables import table_rotary
from .stage_layers import (
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


def load_sharded_base(
    engine: EngineConfig, links: GroupLinks, *, base_id: str | None = None
) -> BaseModel:
    """Load this rank's part, together with all other ranks.

    base_id: to which adapters are bound, if not to the files. Rank 0 alone hashes the files: the
    layout of the others has no base id until rank 0 has told it. Raises UnsupportedModel with the
    reason if the base cannot be divided, or if the divided base computes something else.
    """
    model_dir = locate_base(engine.model)
    config = load_config(model_dir)
    max_model_len = check_config(config, max_model_len=engine.max_model_len)
    contexts = rotary_contexts(config, max_model_len=max_model_len)
    device = _check_device(choose_device(engine.device))
    dtype = choose_dtype(engine.dtype, checkpoint=config.dtype, device=device)
    kv_format = choose_kv_format(engine.kv_dtype, dtype=dtype, device=device)
    kv_test = kv_self_test(kv_format, engine.kv_block_size, max_model_len=max_model_len)
    stored_format = find_packed_format(model_dir)
    check_quantized_once(engine, stored_format)
    quantization = choose_quantization(engine, config)
    ends_format = weight_format(engine.embedding_quantization)
    ranks, stages = links.sums, links.stages
    model = load_weights(
        model_dir,
        config,
        dtype,
        device,
        left_stored=decoder_linears,
        left_experts=experts_parameters,
        packed_later=model_ends if stored_format else None,
    )
    plan = _plan(model, config, ranks)
    if engine.enable_expert_parallel and not plan.experts:
        raise UnsupportedModel(
            f"--enable-expert-parallel is not supported for {config.model_type}: it has no experts"
        )
    multiplies_bytes = _all_multiply_bytes(ranks)
    shards = LinearShards(plan.linears, ranks, multiplies_bytes=multiplies_bytes)
    is_first = ranks.place.rank == 0 and (stages is None or stages.place.is_last)
    stage_plan = plan_stages(model, config, 1 if stages is None else stages.place.num_stages)
    linears = decoder_linears(model)
    absorbed = replace_latents(model)
    references = _References([], [])
    if is_first:
        packed_linears = {path: linears[path] for path in linears.keys() - set(absorbed)}
        with (
            whole_experts(model, quantization),
            whole_layers(
                model, packed_linears, quantization, ends_format, multiplies_bytes=multiplies_bytes
            ),
        ):
            references = _References.of(model, config.vocab_size, kv_test)
    order, num_parameters = module_order(model), sum(each.numel() for each in model.parameters())
    wholes = [
        whole_projection([(path, linears[path]) for path in group])
        for group in sibling_groups(linears)
    ]
    moe_layers = replace_experts(model, ExpertShards(plan.experts, ranks))
    with transformers_quiet():  # it remarks on families that compute attention themselves
        model.set_attn_implementation(ATTENTION_NAME)
    with without_layers(model, stage_plan) as stand_ins:
        ends = adapt_ends(model)
    layout = describe_layout(
        model,
        order,
        ends=ends,
        linears=wholes,
        moe_layers=moe_layers,
        base_id=base_id or (compute_base_id(model_dir) if is_first else ""),
        digests=end_digests(model, model_dir) if is_first else {},
        is_text_part=is_composite(read_config_file(model_dir)),
    )
    whole = LayoutPart(layout, shards.ranges, _held_experts(moe_layers))
    parts = parts_of_stages(whole, stage_plan)
    if stages:
        cut_stage(model, stage_plan, stages, stand_ins)
        ends = ends_of_stage(ends, stages)
        own = stage_plan.layers(stages.place.stage)
        moe_layers = [layer for layer in moe_layers if stage_plan.layer_of(layer.path) in own]
    del linears
    projections = replace_linears(
        model, quantization=quantization, kept_dense=absorbed, shards=shards
    )
    pack_moe_layers(moe_layers, quantization)
    cut_head_parameters(model, held_linears(plan.linears, stage_plan, stages), ranks.place)
    rotary_bytes = table_rotary(model, contexts, dtype=dtype, device=device)
    kv_shapes = _divided_kv_shapes(model, config, links, stage_plan, max_model_len=max_model_len)
    own_stages = BaseStages(
        stages.place if stages else StagePlace(0, 1),
        parts,
        tell_shapes(kv_shapes, stages) if stages else (kv_shapes,),
    )
    packed_ends = pack_ends(model, ends, ends_format)
    return_freed_memory()
    check_replaced(model, config)
    fused = fuse_layers(model) if fuses_layers(device) else None
    packed: list[object] = [part for each in projections for part in each.linear.modules()]
    packed += packed_ends.linears
    packed += [part.weight for layer in moe_layers for part in layer.experts]
    # Ranks may hold experts of different forms, and stages layers.
    bound = _largest(parity_bound(dtype, packed), links)
    error = _check_together(model, config, kv_shapes, references.plain, bound, links)
    kv_error = 0.0
    if kv_format.code_dtype is not None:
        kv_error = _kv_error_together(
            model, config, kv_shapes, references.of_kv, kv_format, kv_test
        )
    if is_first:
        check_thresholds(config, own_stages.all_kv_shapes, max_model_len=max_model_len)
    base = BaseModel(
        model=model,
        config=config,
        part=parts[own_stages.place.stage],
        projections=tuple(projections),
        ends=ends,
        packed_ends=packed_ends,
        moe_layers=tuple(moe_layers),
        absorbed=tuple(absorbed),
        fused=fused,
        kv_shapes=kv_shapes,
        stages=own_stages,
        kv_format=kv_format,
        eos_token_ids=eos_token_ids(model_dir, config),
        max_model_len=max_model_len,
        rotary_contexts=contexts,
        rotary_bytes=rotary_bytes,
        dtype=dtype,
        device=device,
        num_parameters=num_parameters,
        quantization=stored_format or quantization.name,
        self_test_error=error,
        kv_error=kv_error,
        self_test_bound=bound,
        shared_heads=find_shared_heads(config, plan.linears, ranks),
    )
    if stages:
        base.call_between_layers(links.pulse.pass_layer)
    return base


class _References(NamedTuple):
    """What the whole base computes of the self-tests' sequences; none of them on the followers."""

    plain: list[DenseCase]
    of_kv: list[DenseCase]
    """Of the self-test of a quantized KV cache."""

    @classmethod
    def of(cls, model: PreTrainedModel, vocab_size: int, kv_test: SelfTest) -> _References:
        plain = dense_reference(model, vocab_size)
        if kv_test == SelfTest():
            return cls(plain, plain)
        return cls(plain, dense_reference(model, vocab_size, kv_test.lengths))


def _check_device(device: torch.device) -> torch.device:
    if device.type != "cpu":
        raise UnsupportedModel("tensor parallelism is supported on the CPU only: give --device cpu")
    return device


def _all_multiply_bytes(ranks: RankSums) -> bool:
    """Whether every rank prefers products of bytes, for which they exchange other numbers."""
    measured = torch.tensor([prefers_bytes()], dtype=torch.int32)
    return bool(torch.cat(ranks.gather(measured)).all())


def _plan(model: PreTrainedModel, config: Any, ranks: RankSums) -> ShardPlan:
    sizes = {}
    for path, module in decoder_linears(model).items():
        (part,) = whole_projection([(path, module)]).slices
        sizes[path] = LinearSize(part.in_features, part.out_features)
    num_experts = {
        path: matrices_shape(module, parameter_names(module)[0])[0]
        for path, module in served_experts(model).items()
    }
    if ranks.place.size == 1:
        return ShardPlan({}, {path: range(count) for path, count in num_experts.items()})
    # Llama 4's class names the decoder of the composite model, of which it is the text part.
    prefix = model.base_model_prefix if model.base_model is not model else "model"
    return plan_shards(config, prefix, sizes, ranks.place, num_experts=num_experts)


def _held_experts(moe_layers: Sequence[MoeLayer]) -> dict[str, range]:
    """This rank's experts, by the names of their slices."""
    parts = [part for layer in moe_layers for part in layer.experts]
    return {part.whole.slices[0].name: part.held for part in parts}


def _divided_kv_shapes(
    model: PreTrainedModel,
    config: Any,
    links: GroupLinks,
    stage_plan: StagePlan,
    *,
    max_model_len: int,
) -> list[LayerKvShape]:
    """What each layer of this rank caches. Every rank of a stage meets the same error."""
    layers = stage_plan.layers(links.stages.place.stage) if links.stages else None
    try:
        return probe_kv_shapes(model, config, max_model_len=max_model_len, layers=layers)
    except RuntimeError as exc:
        raise UnsupportedModel(
            f"{config.model_type} cannot be divided among {links.sums.place.size} ranks: {exc}"
        ) from exc


def _largest(own: float, links: GroupLinks) -> float:
    """The largest of the values of all ranks of all stages."""
    if links.stages:
        return max(float(told) for told in links.stages.tell_all(repr(own).encode()))
    return float(links.sums.largest(torch.tensor([own], dtype=torch.float64)))


def _check_together(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    bound: float,
    links: GroupLinks,
) -> float:
    """Run the self-test with all ranks; rank 0, which has the cases, compares. Returns its error.

    Raises UnsupportedModel as `check_parity`.
    """
    replaces = replaces_choices(bound)
    choices = _choices_of_stage(cases, links) if replaces and links.stages else None
    with choosing(model, of_first_rank(links.sums)) if replaces else nullcontext():
        if cases:
            parity = measure_parity(model, shapes, cases, bound)
        else:
            dtype = next(model.parameters()).dtype
            _run_along(model, config, shapes, KvFormat(dtype), SelfTest(), choices)
            parity = Parity(0.0, choices.share if choices else 0.0)
    if replaces:
        parity = parity._replace(share=_largest(parity.share, links))
    parity.check(bound)
    return parity.error


def _choices_of_stage(cases: list[DenseCase], links: GroupLinks) -> ReplacedChoices | None:
    """What replaces this stage's choices of experts, as `check_parity` does in the last one; None:
    in the last one."""
    assert links.stages
    recorded = tell_choices([case.choices for case in cases], links.stages)
    return None if links.stages.place.is_last else ReplacedChoices(recorded)


def _kv_error_together(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    cases: list[DenseCase],
    kv_format: KvFormat,
    test: SelfTest,
) -> float:
    """The error of a quantized KV cache, on rank 0."""
    if cases:
        return paged_error(model, shapes, cases, kv_format, test.cuts)
    _run_along(model, config, shapes, kv_format, test)
    return 0.0


def _run_along(
    model: nn.Module,
    config: Any,
    shapes: list[LayerKvShape],
    kv_format: KvFormat,
    test: SelfTest,
    choices: ReplacedChoices | None = None,
) -> None:
    """This rank's part of a self-test that rank 0 compares. `choices`: as of `paged_error`."""
    tokens = self_test_tokens(config.vocab_size, test.lengths)
    with choosing(model, choices.choose) if choices else nullcontext():
        run_paged(model, shapes, tokens, kv_format, test.cuts, choices=choices)
