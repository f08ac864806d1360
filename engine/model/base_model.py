"""The shared base model, the choices of how it is loaded, and its packed linear layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...adapters.arena import Arena
from ...adapters.layout import BaseLayout, Projection, Slice
from ...adapters.layout_part import LayoutPart
from ...adapters.malloc import return_freed_memory
from ...kernels.joined_linear import JoinedLinear
from ...kernels.linear import DenseLinear, Linear
from ...kernels.linear_packing import pack_linear
from ...kernels.packed_experts import PackedExperts
from ...kernels.quantize import WeightFormat, quantize
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.load_progress import report_progress
from ..checkpoint.stored_weights import Values, dense, stack_values
from ..checkpoint.weights import build_model
from ..config import EngineConfig, Quantization
from ..errors import InvalidParameter, UnsupportedModel
from ..exclusion import excluded_layers
from ..kv.cache import KvFormat
from ..kv.groups import LayerKvShape
from ..shards.shared_heads import SharedHeads
from .adapted_module import AdaptedModule, ExtendedModule, replace_module
from .base_stages import BaseStages
from .divided_ends import DividedHead
from .embedding_and_head import ModelEnds
from .experts import MoeLayer, experts_parameters
from .fused_layers import FusedLayers
from .host_reads import find_host_reads
from .linear import FusedProjection, ProjectionSlice
from .linear_shards import LinearShards
from .load_quantization import LoadQuantization
from .packed_ends import PackedEnds, name_formats
from .part_weights import part_weights
from .rope import RotaryContexts
from .state_layers import reads_weight
from .weight_rows import whole_rows

FUSED_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that read the same input if they are in one module."""
_WORTH_RETURNING = 1 << 20
"""The number of weights whose memory is returned to the system when they are packed, and not with
that of all others: each time costs half a millisecond."""


@dataclass(frozen=True)
class BaseModel:
    """A loaded base, ready to run steps."""

    model: PreTrainedModel
    config: Any
    part: LayoutPart
    """What this rank holds of the layout."""
    projections: tuple[FusedProjection, ...]
    """The packed linear layers of the decoder."""
    ends: ModelEnds
    packed_ends: PackedEnds
    moe_layers: tuple[MoeLayer, ...]
    absorbed: tuple[str, ...]
    """The linear layers that attention multiplies by itself; see `latent_attention`."""
    fused: FusedLayers | None
    """None: all layers keep their own code."""
    kv_shapes: list[LayerKvShape]
    """By layer; nothing for those of other stages."""
    stages: BaseStages
    """What the stages of a pipeline have; one if the base is not divided so."""
    kv_format: KvFormat
    eos_token_ids: frozenset[int]
    max_model_len: int
    rotary_contexts: RotaryContexts
    rotary_bytes: int
    """The bytes of the tables of rotary embeddings; 0 if there are none."""
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    quantization: str
    """The format of its files, or of `--quantize` with what is asked for beside it; none: neither.
    The ends have their own."""
    self_test_error: float
    self_test_bound: float
    """The largest `self_test_error` with which it is served."""
    kv_error: float
    """The error of a quantized KV cache, relative to the largest logit; 0.0 for an unquantized
    one."""
    shared_heads: SharedHeads | None = None
    """The ranks that hold the same KV head; None: no other rank does."""
    rounded_head: Linear | None = None
    """The output head in fewer bits, for drafts; None: they multiply by the head itself."""

    @property
    def layout(self) -> BaseLayout:
        """The whole base's, by which adapters are examined and stored."""
        return self.part.whole

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def num_logits(self) -> int:
        """This rank's of a row: those of all tokens on the first rank, which samples."""
        head = self.model.get_output_embeddings()
        return head.num_logits if isinstance(head, DividedHead) else self.vocab_size

    @property
    def embedding_size(self) -> int:
        """The size of the last layer's hidden states, the input of the output head."""
        size = self.model.get_output_embeddings().in_features
        assert isinstance(size, int)
        return size

    @property
    def head_name(self) -> str | None:
        """The output head's slice, if adapters can change it."""
        head = self.ends.head
        return None if head is None else head.projection.slices[0].name

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights as served."""
        packed = sum(linear.weight_bytes for linear in self.linears)
        packed += sum(experts.weight_bytes for experts in self.packed_experts)
        rest: int = sum(parameter.nbytes for parameter in self.model.parameters())
        return packed + rest

    @property
    def linears(self) -> list[Linear]:
        """The packed linear layers, those of the ends included."""
        return [*(fused.linear for fused in self.projections), *self.packed_ends.linears]

    @property
    def rounded_bytes(self) -> int:
        """The bytes of what is held once more, rounded."""
        held: list[Linear | PackedExperts | None] = [self.rounded_head]
        held += [fused.rounded for fused in self.projections]
        held += [part.rounded for layer in self.moe_layers for part in layer.experts]
        return sum(each.weight_bytes for each in held if each is not None)

    @property
    def weight_formats(self) -> str:
        """The formats of its quantized weights, for people; none: there are none."""
        ends = self.packed_ends
        return name_formats(self.quantization, ends.served_table.format, ends.served_head.format)

    @property
    def packed_experts(self) -> list[PackedExperts]:
        """The quantized experts, by layer and parameter."""
        weights = [part.weight for layer in self.moe_layers for part in layer.experts]
        return [weight for weight in weights if isinstance(weight, PackedExperts)]

    @property
    def has_states(self) -> bool:
        """Whether layers keep states of fixed size per sequence."""
        return any(shape.states for shape in self.kv_shapes)

    @cached_property
    def host_reads(self) -> tuple[str, ...]:
        """The operations of a step that wait for the device; runs a few tokens to find them."""
        return tuple(find_host_reads(self.model))

    def call_between_layers(self, callback: Callable[[], None]) -> None:
        """Call back whenever a step reaches its next layer: the largest steps take many seconds."""
        for layer in next(m for m in self.model.modules() if isinstance(m, nn.ModuleList)):
            layer.register_forward_pre_hook(lambda _module, _args: callback())

    def bound_to(self, base_id: str) -> BaseModel:
        """The same base, to whose id adapters are bound."""
        stages = self.stages.bound_to(base_id)
        return replace(self, part=stages.part, stages=stages)

    def attach_arena(self, arena: Arena) -> None:
        """Connect every part of the model to this arena's adapters."""
        arena.on_remove.append(self._forget_adapter)
        adapted = {module.projection: module for module in self._adapted}
        for projection, slice_range in self.part.layout.projection_ranges():
            if self.part.holds(slice_range[0]):
                adapted[projection].attach(arena, slice_range)

    @property
    def extended(self) -> Iterator[ExtendedModule]:
        """The parts of the model that support auxiliary tensors and have all of their inputs."""
        return (each for each in _ends_around(self.ends, self.projections) if not each.is_partial)

    @property
    def partial(self) -> list[ExtendedModule]:
        """Those of which other ranks have the rest of the inputs."""
        return [each for each in _ends_around(self.ends, self.projections) if each.is_partial]

    @property
    def _adapted(self) -> Iterator[AdaptedModule]:
        yield from _ends_around(self.ends, self.projections)
        for layer in self.moe_layers:
            yield from layer.projections

    def _forget_adapter(self, row: int) -> None:
        for module in self._adapted:
            module.forget_adapter(row)

    def forget_step(self) -> None:
        """Drop intermediate tensors of a step that failed midway."""
        for module in self._adapted:
            module.forget_step()


def check_rollback(engine: EngineConfig, shapes: Sequence[LayerKvShape]) -> None:
    """Raise UnsupportedModel if the configuration has proposers that load something, but these
    layers cannot take wrong draft tokens back."""
    if set(engine.proposers) - {"ngram"} and any(shape.states for shape in shapes):
        raise UnsupportedModel(
            "speculation is not supported for a model with states (linear attention, state "
            "spaces): a state cannot take back draft tokens; give --speculation off"
        )


def check_quantized_once(engine: EngineConfig, stored_format: str | None) -> None:
    """Raise InvalidParameter if a base in this format is to be quantized again."""
    if stored_format and engine.quantization is not Quantization.NONE:
        raise InvalidParameter(
            "quantization", f"{engine.model} is quantized already: {stored_format}"
        )


def are_packed_smaller(
    quantization: Quantization,
    stored_format: str | None,
    checkpoint: torch.dtype | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether packed linear layers take fewer bytes than in the serving dtype: quantized ones, and
    on the CPU those in bf16 that are multiplied in fp32."""
    is_wider = dtype is torch.float32 and checkpoint is torch.bfloat16
    is_quantized = quantization is not Quantization.NONE or stored_format is not None
    return is_quantized or (device.type == "cpu" and is_wider)


def packs_experts(engine: EngineConfig, stored_format: str | None) -> bool:
    """Whether experts are packed: where they are quantized, in the files or while they load."""
    return engine.quantization is not Quantization.NONE or stored_format is not None


def choose_device(name: str) -> torch.device:
    """Raises InvalidParameter if the device does not exist on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise InvalidParameter("device", f"{name} is not one of auto, cpu and cuda") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("device", "no CUDA device found")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidParameter("device", f"no CUDA device {device.index} found")
    return device


def choose_dtype(name: str, *, checkpoint: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The serving dtype: the checkpoint's own where the device computes it fast, else fp32."""
    if name != "auto":
        dtype: torch.dtype | None = getattr(torch, name, None)
        if dtype is None or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedModel(f"dtype {name} is none of float32, bfloat16, float16")
        if dtype is torch.float16 and device.type == "cpu":
            raise UnsupportedModel("float16 is not supported on CPU; use bfloat16 or float32")
        return dtype
    checkpoint = checkpoint or torch.float32
    if device.type == "cuda":
        return checkpoint
    has_fast_bfloat16 = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_supported()
    fast = checkpoint is torch.bfloat16 and has_fast_bfloat16
    return torch.bfloat16 if fast else torch.float32


def weight_format(quantization: Quantization) -> WeightFormat | None:
    """None: weights stay as the checkpoint has them."""
    return None if quantization is Quantization.NONE else WeightFormat(quantization.value)


def choose_quantization(engine: EngineConfig, config: Any) -> LoadQuantization:
    """How the model of this configuration is to be quantized; no weight is read. Raises
    InvalidParameter if an exclusion matches no layer."""
    excluded: frozenset[str] = frozenset()
    if engine.quantization_exclude:
        with torch.device("meta"):
            model = build_model(config)
        paths = [*decoder_linears(model), *(each.full_name for each in experts_parameters(model))]
        excluded = excluded_layers(paths, engine.quantization_exclude, param="quantization_exclude")
    return LoadQuantization(
        weight_format(engine.quantization), engine.quantization_group_size, excluded
    )


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer that the decoder calls, by its path.

    Those between the decoder and the output head (BERT's) see the rows of the logits alone.
    """
    head = model.get_output_embeddings()
    in_decoder = set(model.base_model.modules())
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and module in in_decoder
        and module is not head
        and not reads_weight(model, name)
    }


def replace_linears(
    model: PreTrainedModel,
    *,
    quantization: LoadQuantization,
    kept_dense: Collection[str] = (),
    shards: LinearShards | None = None,
    rounded: WeightFormat | None = None,
) -> list[FusedProjection]:
    """Swap every linear layer but the output head for a slice of a packed projection.

    kept_dense: the layers whose weight stays a tensor in the serving dtype. shards: cuts this
    rank's part of each layer; None: all of it. rounded: a format in which each is packed once more.
    Each original weight is freed before the next projection is packed. The largest are packed
    first, while little else is in memory: a projection is in two or three forms meanwhile.
    """
    linears = decoder_linears(model)
    groups = list(sibling_groups(linears))
    sizes = {names[0]: _num_weights(names, linears) for names in groups}
    packed: dict[str, FusedProjection] = {}
    with report_progress("packing projections", len(groups)) as advance:
        for names in sorted(groups, key=lambda names: -sizes[names[0]]):
            group = [(name, linears.pop(name)) for name in names]
            also_rounded: Linear | None = None
            if kept_dense and set(names) <= set(kept_dense):
                linear: Linear = _dense_linear(*group[0], shards)
            else:
                if rounded is not None:
                    also_rounded = _round_group(group, quantization, shards, rounded)
                linear = _pack_group(group, quantization, shards)
            packed[names[0]] = _replace_group(model, group, linear, shards)
            packed[names[0]].rounded = also_rounded
            del group
            if sizes[names[0]] >= _WORTH_RETURNING:
                return_freed_memory()
            advance()
    return_freed_memory()
    return [packed[names[0]] for names in groups]


def _num_weights(names: Sequence[str], linears: Mapping[str, nn.Module]) -> int:
    parts = whole_projection([(name, linears[name]) for name in names]).slices
    return sum(part.in_features * part.out_features for part in parts)


def sibling_groups(linears: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """The paths of these layers by the projection that computes them."""
    taken: set[str] = set()
    for name, module in linears.items():
        if name in taken:
            continue
        parent, _, leaf = name.rpartition(".")
        group = [name]
        for siblings in FUSED_SIBLINGS:
            names = [f"{parent}.{sibling}" for sibling in siblings]
            fusible = all(
                other in linears and _in_features(linears[other]) == _in_features(module)
                for other in names
            )
            if leaf in siblings and fusible:
                group = names
        taken.update(group)
        yield group


def _replace_group(
    model: nn.Module,
    group: list[tuple[str, nn.Module]],
    linear: Linear,
    shards: LinearShards | None,
) -> FusedProjection:
    projection = whole_projection(group)
    exchange = None
    if shards:
        projection = shards.part(projection)
        exchange = shards.exchange(projection)
    fused = FusedProjection(projection, linear, exchange)
    for index, (name, _) in enumerate(group):
        replace_module(model, name, ProjectionSlice(fused, index))
    return fused


def whole_projection(group: Sequence[tuple[str, nn.Module]]) -> Projection:
    """The projection that computes these layers, given by their paths."""
    return Projection(
        tuple(
            Slice(name, in_features=_in_features(module), out_features=_out_features(module))
            for name, module in group
        )
    )


def _dense_linear(path: str, module: nn.Module, shards: LinearShards | None) -> DenseLinear:
    """The layer with its weight dequantized, in the serving dtype; this rank's part of it."""
    values = whole_rows(module)
    if shards:
        values = shards.weight(path, values)
    device = values.codes.device if isinstance(values, QuantizedWeight) else values.device
    weight = dense(values, dtype=_weight(module).dtype, device=device)
    if shards and weight.is_cuda:
        weight = weight.clone()  # a view would keep the whole weight on the device
    return DenseLinear(weight, _bias([(path, module)], shards))


def _pack_group(
    group: Sequence[tuple[str, nn.Module]],
    quantization: LoadQuantization,
    shards: LinearShards | None = None,
) -> Linear:
    """One linear layer of these, which read the same input; of this rank's parts of them."""
    weights = group_weights(group, quantization, shards)
    pack = partial(_pack, dtype=_weight(group[0][1]).dtype, shards=shards)
    if len(weights) == 1:
        return pack(weights[0], group)
    return JoinedLinear(
        [pack(weight, [layer]) for weight, layer in zip(weights, group, strict=True)]
    )


def _round_group(
    group: Sequence[tuple[str, nn.Module]],
    quantization: LoadQuantization,
    shards: LinearShards | None,
    weight_format: WeightFormat,
) -> Linear:
    """As `_pack_group`, of the served values rounded to this format."""
    dtype = _weight(group[0][1]).dtype
    values = [
        value.dequantize(dtype) if isinstance(value, QuantizedWeight) else value.to(dtype)
        for value in group_weights(group, quantization, shards)
    ]
    return _pack(quantize(torch.cat(values), weight_format), group, dtype=dtype, shards=shards)


def _pack(
    weight: Values,
    group: Sequence[tuple[str, nn.Module]],
    *,
    dtype: torch.dtype,
    shards: LinearShards | None,
) -> Linear:
    """One linear layer of the weight of these."""
    multiplies_bytes = None
    if shards:
        # A rank's part may have one scale for each output where the whole layer has groups.
        has_groups = isinstance(weight, QuantizedWeight) and (
            weight.group < _in_features(group[0][1])
        )
        multiplies_bytes = shards.multiplies_bytes and not has_groups
    return pack_linear(weight, _bias(group, shards), dtype=dtype, multiplies_bytes=multiplies_bytes)


def group_weights(
    group: Sequence[tuple[str, nn.Module]],
    quantization: LoadQuantization,
    shards: LinearShards | None = None,
) -> Sequence[Values]:
    """The weights of linear layers that read the same input: one, `[out, in]` below one another;
    one for each if they are not of one form.

    group: the layers by their paths. shards: cuts this rank's part of each. Raises QuantizedBase.
    """
    if shards:
        return part_weights(group, quantization, shards)
    weights = [whole_weight(path, module, quantization) for path, module in group]
    stacked = stack_values(weights)
    return weights if stacked is None else [stacked]


def whole_weight(path: str, module: nn.Module, quantization: LoadQuantization) -> Values:
    """The layer's weight as it is packed. Raises QuantizedBase."""
    return quantization.apply(path, whole_rows(module))


def _as_rows(module: nn.Module, weight: Tensor) -> Tensor:
    """The module's weight as `[out_features, in_features]`."""
    return weight.T if isinstance(module, Conv1D) else weight


def _in_features(module: nn.Module) -> int:
    return int(_as_rows(module, _weight(module)).shape[1])


def _out_features(module: nn.Module) -> int:
    return int(_as_rows(module, _weight(module)).shape[0])


def _weight(module: nn.Module) -> Tensor:
    """In the serving dtype; without values if they are left in their file."""
    assert isinstance(module.weight, Tensor)
    return module.weight


def _bias(
    group: Sequence[tuple[str, nn.Module]], shards: LinearShards | None = None
) -> Tensor | None:
    """The bias of linear layers below one another; None: none has any."""
    biases = [
        _own_bias(path, module.bias.detach(), shards) if isinstance(module.bias, Tensor) else None
        for path, module in group
    ]
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    projection = whole_projection(group)
    sizes = (shards.part(projection) if shards else projection).slices
    return torch.cat(
        [
            present[0].new_zeros(part.out_features) if bias is None else bias
            for bias, part in zip(biases, sizes, strict=True)
        ]
    )


def _own_bias(path: str, bias: Tensor, shards: LinearShards | None) -> Tensor | None:
    return bias if shards is None else shards.bias(path, bias)


def describe_layout(
    model: PreTrainedModel,
    order: Mapping[str, int],
    *,
    ends: ModelEnds,
    linears: Sequence[Projection],
    moe_layers: Sequence[MoeLayer],
    base_id: str,
    digests: dict[str, list[str]],
    is_text_part: bool,
) -> BaseLayout:
    """The parts of the model that adapters can change; `order` is that of its modules before these
    parts."""
    decoder = _in_order(order, linears, moe_layers)
    first, last = (end and end.projection for end in (ends.embedding, ends.head))
    return BaseLayout(
        base_id=base_id,
        projections=tuple(part for part in (first, *decoder, last) if part),
        refused={**dict(_refused_modules(model, linears, moe_layers)), **ends.refused},
        ties_embeddings=ends.are_tied,
        digests=digests,
        is_text_part=is_text_part,
        fixed_vocabulary=ends.fixed_vocabulary,
    )


def num_query_heads(config: Any) -> int:
    """Heads of attention, of all layers of a model with this configuration."""
    text = config.get_text_config()
    return getattr(text, "num_attention_heads", 0) * int(text.num_hidden_layers)


def module_order(model: nn.Module) -> dict[str, int]:
    """Each module's path and its place among all, which is that of its execution or near it."""
    return {path: place for place, (path, _) in enumerate(model.named_modules())}


def _in_order(
    order: Mapping[str, int], linears: Sequence[Projection], moe_layers: Sequence[MoeLayer]
) -> list[Projection]:
    """The decoder's projections by their module path in the model."""
    placed = [(order[projection.slices[0].name], projection) for projection in linears]
    for layer in moe_layers:
        placed += [(order[layer.path], projection) for projection in layer.wholes]
    return [projection for _, projection in sorted(placed, key=lambda part: part[0])]


def _ends_around(
    ends: ModelEnds, projections: Sequence[FusedProjection]
) -> Iterator[ExtendedModule]:
    """The decoder's projections between the two ends of the model, as far as those are adapted."""
    if ends.embedding:
        yield ends.embedding
    yield from projections
    if ends.head:
        yield ends.head


def _refused_modules(
    model: PreTrainedModel, linears: Sequence[Projection], moe_layers: Sequence[MoeLayer]
) -> Iterator[tuple[str, str]]:
    """The modules with a matrix of their own that adapters cannot change."""
    names = {part.name for projection in linears for part in projection.slices}
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    served = ends.union(*(layer.modules for layer in moe_layers))
    for name, module in model.named_modules():
        is_served = name in names or module in served
        if is_served or all(p.ndim < 2 for p in module.parameters(recurse=False)):
            continue
        if isinstance(module, nn.Embedding):
            yield name, "LoRA on embeddings other than that of the tokens is not served"
        else:
            yield name, f"LoRA on {type(module).__name__} is not served"


def eos_token_ids(model_dir: Path, config: Any) -> frozenset[int]:
    """The tokens that end an output, as the base's files say."""
    values = [getattr(config, "eos_token_id", None)]  # not every class declares it
    generation = model_dir / "generation_config.json"
    if generation.exists():
        values.append(json.loads(generation.read_text()).get("eos_token_id"))
    return frozenset(
        token
        for value in values
        if value is not None
        for token in (value if isinstance(value, list) else [value])
    )
