"""Loads a base that is not divided: transformers' classes with Loraplex's attention and linears."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...adapters.layout_part import LayoutPart
from ...adapters.malloc import return_freed_memory
from ...kernels.int8_linear import Int8Linear
from ...kernels.linear import Linear
from ...kernels.quantize import WeightFormat
from ..checkpoint.base_config import read_config_file
from ..checkpoint.base_identity import compute_base_id
from ..checkpoint.next_token_layer import NextTokenLayer
from ..checkpoint.text_part import is_composite
from ..checkpoint.weight_digests import end_digests
from ..checkpoint.weights import build_model, load_weights
from ..config import EngineConfig, Quantization
from ..kv.cache import check_kv_format
from ..kv.groups import LayerKvShape
from .admission import (
    DenseCase,
    References,
    check_parity,
    check_replaced,
    paged_error,
    probe_kv_shapes,
)
from .base_model import (
    BaseModel,
    are_packed_smaller,
    check_rollback,
    decoder_linears,
    describe_layout,
    eos_token_ids,
    module_order,
    packs_experts,
    replace_linears,
)
from .base_stages import BaseStages
from .decoder_layers import replace_decoder_layers
from .embedding_and_head import ModelEnds, adapt_ends
from .experts import MoeLayer, experts_parameters, pack_moe_layers, replace_experts
from .fused_layers import FusedLayers, fuse_layers, fuses_layers
from .latent_attention import replace_latents
from .linear import FusedProjection
from .load_settings import LoadSettings
from .packed_ends import PackedEnds, model_ends, pack_ends, round_head
from .parity_bound import parity_bound
from .rotary_tables import table_rotary
from .threshold_test import check_thresholds

CheckRoom = Callable[[nn.Module, torch.dtype, torch.device], None]


class _Rebuilt(NamedTuple):
    """The model has Loraplex's attention and experts; its linear layers are its own."""

    order: Mapping[str, int]
    moe_layers: list[MoeLayer]
    absorbed: Collection[str]
    """The projections of latent attention, which stay dense."""
    rotary_bytes: int
    kv_shapes: list[LayerKvShape]


class _Packed(NamedTuple):
    """What the model's linear layers, ends and norms have become."""

    ends: ModelEnds
    digests: dict[str, list[str]]
    """Of the ends, before they are packed."""
    packed_ends: PackedEnds
    rounded_head: Linear | None
    projections: list[FusedProjection]
    fused: FusedLayers | None


class _Results(NamedTuple):
    """Of the self-tests."""

    bound: float
    error: float
    """After the linear layers were packed; 0 if that changes values."""
    kv_error: float


def load_base_model(
    engine: EngineConfig,
    *,
    base_id: str | None = None,
    check_room: CheckRoom | None = None,
    rounded: WeightFormat | None = None,
    layer: NextTokenLayer | None = None,
) -> BaseModel:
    """Load, admit and rebuild the model. Raises UnsupportedModel with the reason if it cannot.

    base_id: to which its adapters are bound, if not to these files.
    check_room: is called with the model on the meta device, before weights are read that are
    loaded as they are; raises InsufficientMemory.
    rounded: the format in which linear layers, experts and output head are held once more, for
    drafts.
    layer: that of the folder's files whose model is loaded; None: the folder's own model.
    """
    settings = LoadSettings.of(engine, rounded=rounded, layer=layer)
    model = _read(settings, check_room)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    references = References.of(model, settings.config.vocab_size, settings.kv_test)
    rebuilt = _rebuild(model, settings)
    kv_error = _check_rebuilt(model, settings, rebuilt, references)
    packed = _pack(model, settings, rebuilt)
    results = _check_packed(model, settings, rebuilt, packed, references.plain, kv_error)
    return _assemble(model, settings, rebuilt, packed, results, base_id, num_parameters)


def _read(settings: LoadSettings, check_room: CheckRoom | None) -> PreTrainedModel:
    """The model, of which those layers stay in the files that take less memory once packed."""
    engine, config, stored_format = settings.engine, settings.config, settings.stored_format
    dtype, device = settings.dtype, settings.device
    is_smaller = are_packed_smaller(
        engine.quantization, stored_format, config.dtype, dtype=dtype, device=device
    )
    left_experts = experts_parameters if packs_experts(engine, stored_format) else None
    with torch.device("meta"):
        empty = build_model(config)
    if check_room and stored_format is None and not is_smaller and left_experts is None:
        check_room(empty, dtype, device)
    return load_weights(
        settings.model_dir,
        config,
        dtype,
        device,
        kind=type(empty),
        left_stored=decoder_linears if is_smaller else None,
        left_experts=left_experts,
        packed_later=model_ends if stored_format else None,
        layer=settings.layer,
    )


def _rebuild(model: PreTrainedModel, settings: LoadSettings) -> _Rebuilt:
    """Replace the experts, the attention and its rotary embeddings."""
    order = module_order(model)
    moe_layers = replace_experts(model)
    absorbed = replace_latents(model)
    rotary_bytes = table_rotary(
        model, settings.contexts, dtype=settings.dtype, device=settings.device
    )
    shapes = probe_kv_shapes(model, settings.config, max_model_len=settings.max_model_len)
    return _Rebuilt(order, moe_layers, absorbed, rotary_bytes, shapes)


def _check_rebuilt(
    model: PreTrainedModel, settings: LoadSettings, rebuilt: _Rebuilt, references: References
) -> float:
    """Run the self-tests of the attention. Returns the error of a quantized KV cache. Raises
    UnsupportedModel."""
    shapes, kv_format = rebuilt.kv_shapes, settings.kv_format
    check_kv_format(kv_format, shapes)
    check_rollback(settings.engine, shapes)
    check_parity(model, shapes, references.plain)
    check_thresholds(settings.config, shapes, max_model_len=settings.max_model_len)
    if kv_format.code_dtype is None:
        return 0.0
    return paged_error(model, shapes, references.of_kv, kv_format, settings.kv_test.cuts)


def _pack(model: PreTrainedModel, settings: LoadSettings, rebuilt: _Rebuilt) -> _Packed:
    """Pack the ends, then one projection after another, each original freed; fuse what is left."""
    ends = adapt_ends(model)
    digests = end_digests(model, settings.model_dir)
    rounded_head = None
    if settings.rounded is not None and settings.ends_format is None:
        rounded_head = round_head(model, ends, settings.rounded)
    # The decoder's layers may still be in their files: there is room for two copies of the ends.
    packed_ends = pack_ends(model, ends, settings.ends_format)
    return_freed_memory()
    projections = replace_linears(
        model,
        quantization=settings.quantization,
        kept_dense=rebuilt.absorbed,
        rounded=settings.rounded,
    )
    pack_moe_layers(rebuilt.moe_layers, settings.quantization, settings.rounded)
    check_replaced(model, settings.config)
    fused = _fuse(model, settings, rebuilt.kv_shapes)
    return _Packed(ends, digests, packed_ends, rounded_head, projections, fused)


def _fuse(
    model: PreTrainedModel, settings: LoadSettings, shapes: list[LayerKvShape]
) -> FusedLayers | None:
    if not fuses_layers(settings.device):
        return None
    fused = fuse_layers(model)
    if settings.device.type != "cpu":
        return fused
    layers = replace_decoder_layers(
        model, settings.config, shapes, max_model_len=settings.max_model_len
    )
    return replace(fused, layers=layers)


def _check_packed(
    model: PreTrainedModel,
    settings: LoadSettings,
    rebuilt: _Rebuilt,
    packed: _Packed,
    cases: list[DenseCase],
    kv_error: float,
) -> _Results:
    """Run the self-test again, if packing should change no value. Raises UnsupportedModel."""
    parts = _packed_parts(rebuilt.moe_layers, packed)
    bound = parity_bound(settings.dtype, parts)
    engine = settings.engine
    rounds = {engine.quantization, engine.embedding_quantization} != {Quantization.NONE}
    if rounds or any(isinstance(part, Int8Linear) for part in parts):
        return _Results(bound, 0.0, kv_error)
    error = check_parity(model, rebuilt.kv_shapes, cases, bound=bound)
    return _Results(bound, error, kv_error)


def _packed_parts(moe_layers: Sequence[MoeLayer], packed: _Packed) -> list[object]:
    """The packed layers, as `parity_bound` takes them."""
    layers = [part for each in packed.projections for part in each.linear.modules()]
    experts = [part.weight for layer in moe_layers for part in layer.experts]
    return [*layers, *packed.packed_ends.linears, *experts]


def _assemble(
    model: PreTrainedModel,
    settings: LoadSettings,
    rebuilt: _Rebuilt,
    packed: _Packed,
    results: _Results,
    base_id: str | None,
    num_parameters: int,
) -> BaseModel:
    model_dir, config = settings.model_dir, settings.config
    layout = describe_layout(
        model,
        rebuilt.order,
        ends=packed.ends,
        linears=[fused.projection for fused in packed.projections],
        moe_layers=rebuilt.moe_layers,
        base_id=base_id or compute_base_id(model_dir),
        digests=packed.digests,
        is_text_part=is_composite(read_config_file(model_dir)),
    )
    part = LayoutPart(layout)
    return BaseModel(
        model=model,
        config=config,
        part=part,
        projections=tuple(packed.projections),
        ends=packed.ends,
        packed_ends=packed.packed_ends,
        moe_layers=tuple(rebuilt.moe_layers),
        absorbed=tuple(rebuilt.absorbed),
        fused=packed.fused,
        kv_shapes=rebuilt.kv_shapes,
        stages=BaseStages.one(part, rebuilt.kv_shapes),
        kv_format=settings.kv_format,
        eos_token_ids=eos_token_ids(model_dir, config),
        max_model_len=settings.max_model_len,
        rotary_contexts=settings.contexts,
        rotary_bytes=rebuilt.rotary_bytes,
        dtype=settings.dtype,
        device=settings.device,
        num_parameters=num_parameters,
        quantization=settings.stored_format or settings.quantization.name,
        self_test_error=results.error,
        self_test_bound=results.bound,
        kv_error=results.kv_error,
        rounded_head=packed.rounded_head,
    )
