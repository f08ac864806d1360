"""How a base would be served, from the headers of its files: no weight is read.

The model is built on the meta device, and its linear layers are chosen by the code that packs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from ...adapters.layout import BaseLayout, Projection, Slice
from ...adapters.layout_part import LayoutPart
from ...kernels.expert_packing import ExpertsKind, empty_experts
from ...kernels.linear_packing import LinearKind, choose_linear
from ...kernels.linear_sizes import linear_bytes
from ...kernels.packed_experts import PackedExperts
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.files import locate_base
from ..checkpoint.packed_format import find_packed_format
from ..checkpoint.quantization_error import QuantizedAtLoad
from ..checkpoint.stored_experts import ExpertsParameter, Stacking, StoredPart
from ..checkpoint.stored_weights import Values, kept_dtype, stack_values
from ..checkpoint.weight_forms import WeightForm, read_weight_forms
from ..checkpoint.weights import EmptyModel, build_model, empty_model, load_config
from ..config import EngineConfig, Quantization
from ..errors import UnsupportedModel
from ..kv.cache import KvFormat, choose_kv_format
from ..kv.groups import LayerKvShape
from .admission import check_config, probe_kv_shapes
from .base_model import (
    are_packed_smaller,
    check_quantized_once,
    choose_dtype,
    choose_quantization,
    decoder_linears,
    group_weights,
    num_query_heads,
    packs_experts,
    sibling_groups,
    weight_format,
    whole_weight,
)
from .expected_ends import ExpectedEnds, expect_ends
from .expected_part import ExpectedPart
from .expected_rounded import ExpectedRounded
from .experts import experts_parameters, matrices_shape, parameter_names, served_experts
from .latent_attention import replace_latents
from .load_quantization import LoadQuantization
from .packed_ends import name_formats
from .rope import RotaryContexts, rotary_contexts
from .rounded_linears import rounded_format
from .skeleton import bypass_experts

_READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
)


class WeightKind(StrEnum):
    """What a weight is for."""

    LINEAR = "linear layers"
    EXPERTS = "experts"
    EMBEDDING = "embedding"
    HEAD = "output head"
    OTHER = "norms, biases, routers"


@dataclass
class ExpectedWeights:
    """The weights of one kind."""

    formats: Counter[str] = field(default_factory=Counter)
    """The number of stored weights by their format in the files; none: not quantized."""
    file_bytes: int = 0
    served_bytes: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    """The number of packed matrices by the class that multiplies them, of stacked experts by the
    function."""
    num_made_dense: int = 0
    """Weights that are quantized in the files and served in the serving dtype."""

    @property
    def num_quantized(self) -> int:
        return self.formats.total() - self.formats["none"]


@dataclass(frozen=True)
class ExpectedBase:
    """A base as it would be served."""

    model_dir: Path
    model_type: str
    num_parameters: int
    device_type: str
    dtype: torch.dtype
    quantization: str
    """As `BaseModel.quantization`."""
    weight_formats: str
    """As `BaseModel.weight_formats`."""
    weights: Mapping[WeightKind, ExpectedWeights]
    rounded_bytes: int
    """As `BaseModel.rounded_bytes`."""
    projections: Sequence[Projection]
    """The linear layers of the decoder."""
    part: LayoutPart
    """What the rank holds of them."""
    vocab_size: int
    hidden_size: int
    num_query_heads: int
    """Of all layers, added up."""
    experts_width: int
    """The outputs per token of the experts that it is routed to, and their inputs; 0 without
    experts."""
    quantized_at_load: Mapping[str, QuantizedAtLoad]
    """The stored weights, those of experts too, that `--quantize` and `--quantize-embeddings`
    quantize."""
    kv_shapes: list[LayerKvShape] | None
    """By layer; nothing if another stage has the layer. None: only a model with values tells."""
    kv_format: KvFormat
    max_model_len: int
    rotary_contexts: RotaryContexts

    @property
    def weight_bytes(self) -> int:
        return sum(part.served_bytes for part in self.weights.values())

    @property
    def widest_result(self) -> int:
        """The most outputs per token of the rank's layers that are computed together."""
        widths = (
            sum(each.out_features for each in projection.slices)
            for projection in self.part.layout.projections
        )
        return max(self.experts_width, *widths)

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in self.weights.values())


def expect_base(engine: EngineConfig, device: torch.device, *, stage: int = 0) -> ExpectedBase:
    """What `load_base_model` would load, and `load_sharded_base` on the first rank of this stage;
    the device need not exist here.

    Raises as they do for everything but the weights' values, and UnsupportedModel for ranks of a
    base whose parts only they know.
    """
    model_dir = locate_base(engine.model)
    config = load_config(model_dir)
    max_model_len = check_config(config, max_model_len=engine.max_model_len)
    dtype = choose_dtype(engine.dtype, checkpoint=config.dtype, device=device)
    stored_format = find_packed_format(model_dir)
    check_quantized_once(engine, stored_format)
    quantization = choose_quantization(engine, config)
    empty, forms = empty_model(model_dir, config, dtype), read_weight_forms(model_dir)
    outline = _Outline(
        empty,
        forms,
        dtype,
        device.type,
        quantization,
        ends=expect_ends(
            empty,
            forms,
            weight_format(engine.embedding_quantization),
            device_type=device.type,
        ),
        leaves_stored=are_packed_smaller(
            engine.quantization, stored_format, config.dtype, dtype=dtype, device=device
        ),
        packs_experts=packs_experts(engine, stored_format),
        part=None if engine.num_ranks == 1 else ExpectedPart(empty.model, config, engine, stage),
    )
    projections = outline.projections
    rounded_bytes = 0
    if (rounded := rounded_format(engine)) is not None:
        rounds_head = engine.embedding_quantization is Quantization.NONE and engine.num_ranks == 1
        copy = ExpectedRounded(rounded, dtype, device.type)
        rounded_bytes = outline.rounded_bytes(copy, rounds_head=rounds_head)
    return ExpectedBase(
        model_dir=model_dir,
        model_type=config.model_type,
        num_parameters=outline.num_parameters,
        device_type=device.type,
        dtype=dtype,
        quantization=stored_format or quantization.name,
        weight_formats=outline.weight_formats(stored_format or quantization.name),
        weights=outline.weights(),
        rounded_bytes=rounded_bytes,
        projections=projections,
        part=outline.layout_part(BaseLayout("unknown", tuple(projections))),
        vocab_size=config.vocab_size,
        hidden_size=projections[0].in_features,
        num_query_heads=num_query_heads(config),
        experts_width=outline.experts_width(getattr(config, "num_experts_per_tok", None) or 1),
        quantized_at_load=outline.quantized_at_load(),
        kv_shapes=outline.kv_shapes(_kv_shapes(config, max_model_len)),
        kv_format=choose_kv_format(engine.kv_dtype, dtype=dtype, device=device),
        max_model_len=max_model_len,
        rotary_contexts=rotary_contexts(config, max_model_len=max_model_len),
    )


def _kv_shapes(config: Any, max_model_len: int) -> list[LayerKvShape] | None:
    """Raises UnsupportedModel if the model's attention is not served."""
    with torch.device("meta"):
        model = build_model(config)
    bypass_experts(model)
    replace_latents(model, has_values=False)
    try:
        with _ValuesAreOne():
            return probe_kv_shapes(model, config, max_model_len=max_model_len)
    except UnsupportedModel:
        raise
    except (RuntimeError, NotImplementedError):  # it needs more than single values
        return None


class _ValuesAreOne(TorchDispatchMode):
    """While entered, a number that is read from a tensor without values is 1, and a truth is true.

    transformers reads whether the positions are of one sequence, and whether they exceed a rope's
    original context.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 1
        return func(*args, **(kwargs or {}))


class _Experts(NamedTuple):
    """Experts that stay quantized."""

    packed: PackedExperts
    """Without values."""
    parts: Sequence[StoredPart]


class _Outline:
    """Sorts a model's weights by kind and finds their served form."""

    def __init__(
        self,
        empty: EmptyModel,
        forms: Mapping[str, WeightForm],
        dtype: torch.dtype,
        device_type: str,
        quantization: LoadQuantization,
        *,
        ends: ExpectedEnds,
        leaves_stored: bool,
        packs_experts: bool,
        part: ExpectedPart | None,
    ) -> None:
        """`leaves_stored`: linear layers are packed from the form in the files; `packs_experts`: so
        are experts. `part`: what the rank holds; None: everything."""
        self._model = empty.model
        self._stored_names = empty.stored_names
        self._forms = forms
        self._dtype = dtype
        self._device_type = device_type
        self._quantization = quantization
        self._ends = ends
        self._part = part
        self._linears = decoder_linears(empty.model)
        self._absorbed = frozenset(replace_latents(empty.model, has_values=False))
        self.num_parameters = sum(parameter.numel() for parameter in empty.model.parameters())
        self._left = self._stored_names.keys() & self._linears.keys() if leaves_stored else set()
        for path in self._left:
            self._leave(path)
        self._experts = dict(self._find_experts(empty.stacking)) if packs_experts else {}

    @property
    def projections(self) -> list[Projection]:
        return [
            Projection(tuple(self._slice(path) for path in group))
            for group in sibling_groups(self._linears)
        ]

    def layout_part(self, layout: BaseLayout) -> LayoutPart:
        return LayoutPart(layout) if self._part is None else self._part.layout_part(layout)

    def kv_shapes(self, whole: list[LayerKvShape] | None) -> list[LayerKvShape] | None:
        """The rank's, given those of the whole base."""
        if self._part is None or whole is None:
            return whole
        return [self._part.kv_shape(layer, shape) for layer, shape in enumerate(whole)]

    def experts_width(self, num_per_token: int) -> int:
        """See `ExpectedBase.experts_width`."""
        shapes = (
            matrices_shape(module, parameter_names(module)[0])
            for module in served_experts(self._model).values()
        )
        return max((num_per_token * (outs + ins) for _, outs, ins in shapes), default=0)

    def weights(self) -> dict[WeightKind, ExpectedWeights]:
        """By kind, without the kinds that the model does not have."""
        found = {kind: ExpectedWeights() for kind in WeightKind}
        kinds = self._stored_kinds()
        packed = {self._stored_names[path] for path in self._left - self._absorbed}
        packed |= {end.stored_name for end in self._ends.stored_once if end.stored_name}
        packed |= {part.name for experts in self._experts.values() for part in experts.parts}
        for name, form in self._forms.items():
            kind = kinds.get(name) or _kind_by_name(name)
            part = found[kind]
            part.formats[form.format or "none"] += 1
            part.file_bytes += form.file_bytes
            stays = name in packed and isinstance(form.values, QuantizedWeight)
            part.num_made_dense += form.format is not None and not stays
        for paths in filter(self._holds_group, sibling_groups(self._linears)):
            self._add_group(found[_linear_kind(paths[0])], paths)
        self._add_rest(found)
        return {kind: part for kind, part in found.items() if part.formats or part.served_bytes}

    def rounded_bytes(self, copy: ExpectedRounded, *, rounds_head: bool) -> int:
        """Of the rank. `rounds_head`: if its file does not have it quantized."""
        num_bytes = copy.linears_bytes(self._model, self._absorbed, self._cut_dense)
        num_bytes += copy.experts_bytes(self._model, self._num_experts)
        if rounds_head and self._ends.head is None:
            num_bytes += copy.head_bytes(self._model)
        return num_bytes

    def weight_formats(self, linears: str) -> str:
        """`linears`: the format of the linear layers."""
        ends = (self._ends.table, self._ends.head)
        return name_formats(linears, *("none" if end is None else end.format for end in ends))

    def quantized_at_load(self) -> dict[str, QuantizedAtLoad]:
        found: dict[str, QuantizedAtLoad] = {}
        for path in (self._linears.keys() & self._stored_names.keys()) - self._absorbed:
            is_transposed = isinstance(self._linears[path], Conv1D)
            self._note_quantized(found, path, [self._stored_names[path]], is_transposed)
        for parameter, experts in self._experts.items():
            names = [part.name for part in experts.parts]
            self._note_quantized(found, parameter.full_name, names, parameter.is_transposed)
        for end in self._ends.stored_once:
            if end.stored_name and end.quantized_to:
                found[end.stored_name] = QuantizedAtLoad(end.quantized_to, is_transposed=False)
        return found

    def _note_quantized(
        self,
        found: dict[str, QuantizedAtLoad],
        path: str,
        names: Sequence[str],
        is_transposed: bool,
    ) -> None:
        """Add the stored weights of the layer at this path, if it is quantized while loading."""
        if weight_format := self._quantization.format_of(path):
            group_size = self._quantization.group_size
            at_load = QuantizedAtLoad(weight_format, is_transposed, group_size)
            found.update(dict.fromkeys(names, at_load))

    def _find_experts(self, stacking: Stacking) -> Iterator[tuple[ExpertsParameter, _Experts]]:
        """The experts that stay quantized, as `ExpertsProjection.pack` decides."""
        for parameter in experts_parameters(self._model):
            weight = getattr(self._model.get_submodule(parameter.path), parameter.name)
            matrices = stacking.matrices(weight, is_transposed=parameter.is_transposed)
            if matrices is None:
                continue
            forms = [
                self._quantization.apply(
                    parameter.full_name, self._expert(parts, parameter.is_transposed)
                )
                for parts in matrices
            ]
            num_experts = self._num_experts(parameter.path, len(forms))
            packed = empty_experts(forms[0], num_experts, device_type=self._device_type)
            if packed is not None and all(
                isinstance(form, QuantizedWeight) and packed.accepts(form) for form in forms
            ):
                yield parameter, _Experts(packed, [part for parts in matrices for part in parts])

    def _expert(self, parts: Sequence[StoredPart], is_transposed: bool) -> Values:
        """One expert's matrix, as `StoredExperts.read` gives it."""
        values = []
        for part in parts:
            value = self._forms[part.name].values
            if isinstance(value, Tensor) and part.expert is not None:
                value = value[0].T if is_transposed else value[0]
            values.append(value)
        stacked = stack_values(values)
        if stacked is None:
            return torch.empty(0, device="meta", dtype=torch.float32)  # it becomes dense
        return stacked

    def _leave(self, path: str) -> None:
        """Let the module's weight be read in its stored form, as `leave_stored` does."""
        values = self._forms[self._stored_names[path]].values
        if isinstance(values, Tensor):
            values = values.to(kept_dtype(values.dtype, self._dtype))
        self._linears[path].__dict__["read_weight"] = lambda: values

    def _slice(self, path: str) -> Slice:
        out_features, in_features = _matrix(self._linears[path])
        return Slice(path, in_features=in_features, out_features=out_features)

    def _stored_kinds(self) -> dict[str, WeightKind]:
        """The kinds of the stored weights that are a module's weight as they are."""
        head, table = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        kinds = {}
        for path, name in self._stored_names.items():
            module = self._model.get_submodule(path)
            if path in self._linears:
                kinds[name] = _linear_kind(path)
            elif module is table:
                kinds[name] = WeightKind.EMBEDDING
            elif module is head:
                kinds.setdefault(name, WeightKind.HEAD)  # a tied one is the embedding's
        return kinds

    def _holds_group(self, paths: Sequence[str]) -> bool:
        return self._part is None or self._part.holds(paths[0])

    def _add_group(self, part: ExpectedWeights, paths: Sequence[str]) -> None:
        """Add the linear layers of one projection."""
        if self._absorbed.issuperset(paths):
            size = _matrix(self._linears[paths[0]])
            weight = torch.empty(size, dtype=self._dtype, device="meta")
            self._add_linear(part, self._cut(paths[0], weight), LinearKind.DENSE)
            return
        group = [(path, self._linears[path]) for path in paths]
        if self._part is None:
            weights = group_weights(group, self._quantization)
        else:
            cut = [self._cut(path, whole_weight(path, m, self._quantization)) for path, m in group]
            stacked = stack_values(cut)
            weights = cut if stacked is None else [stacked]
        for values in weights:
            self._add_packed(part, values)

    def _cut(self, path: str, weight: Values) -> Values:
        return weight if self._part is None else self._part.weight(path, weight)

    def _cut_dense(self, path: str, weight: Tensor) -> Tensor:
        part = self._cut(path, weight)
        assert isinstance(part, Tensor)
        return part

    def _add_packed(self, part: ExpectedWeights, values: Values) -> None:
        kind = choose_linear(values, dtype=self._dtype, device_type=self._device_type)
        self._add_linear(part, values, kind)

    def _add_linear(self, part: ExpectedWeights, values: Values, kind: LinearKind) -> None:
        part.kernels[kind] += 1
        part.served_bytes += linear_bytes(
            values, kind, dtype=self._dtype, device_type=self._device_type
        )

    def _add_rest(self, found: Mapping[WeightKind, ExpectedWeights]) -> None:
        """Add the parameters that are no linear layer's."""
        head, table = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        done = {id(p) for module in self._linears.values() for p in module.parameters()}
        done |= self._add_ends(found)
        packed = {p.full_name: experts.packed for p, experts in self._experts.items()}
        for path, parameter in self._model.named_parameters():
            if id(parameter) in done or not (self._part is None or self._part.holds(path)):
                continue
            kind = _kind_by_name(path)
            if path in packed:
                found[kind].kernels[type(packed[path]).__name__] += 1
                found[kind].served_bytes += packed[path].weight_bytes
                continue
            if kind is WeightKind.EXPERTS:
                found[kind].kernels[ExpertsKind.DENSE] += 1
            num_bytes = self._part_bytes(path, parameter)
            if parameter is table.weight:
                kind, num_bytes = WeightKind.EMBEDDING, self._end_bytes(parameter)
            elif parameter is head.weight:
                kind, num_bytes = WeightKind.HEAD, self._end_bytes(parameter)
                found[kind].kernels[LinearKind.DENSE] += 1
            found[kind].served_bytes += num_bytes

    def _add_ends(self, found: Mapping[WeightKind, ExpectedWeights]) -> set[int]:
        """Add the ends that are packed. Returns the parameters that are then done, by id; so are
        those that only other stages have."""
        head, table = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        has_table = self._part is None or self._part.has_embedding
        has_head = self._part is None or self._part.has_head
        done = set()
        for end in self._ends.stored_once:
            is_table = end is self._ends.table
            serves = has_table or (has_head and self._ends.are_tied) if is_table else has_head
            if serves:
                kind = WeightKind.EMBEDDING if is_table else WeightKind.HEAD
                rows = end.weight.rows(0, self._num_tokens(end.weight.shape[0]))
                self._add_linear(found[kind], rows, end.kind)
            done.add(id(end.module.weight))
        # On the CPU a plain head gets a packed copy; a table that is tied to it stays.
        is_dense = self._ends.head is None
        if is_dense and self._device_type == "cpu" and type(head) is nn.Linear:
            if has_head:
                weight = head.weight.detach()
                rows_of_part = weight[: self._num_tokens(len(weight))]
                self._add_packed(found[WeightKind.HEAD], rows_of_part)
            done |= {id(p) for p in head.parameters() if p is not table.weight}
        if not has_table and (head.weight is not table.weight or self._device_type == "cpu"):
            done.add(id(table.weight))
        if not has_head and head.weight is not table.weight:
            done |= {id(p) for p in head.parameters()}
        return done

    def _num_tokens(self, num_tokens: int) -> int:
        return num_tokens if self._part is None else self._part.tokens(num_tokens)

    def _end_bytes(self, weight: Tensor) -> int:
        return weight[: self._num_tokens(len(weight))].nbytes

    def _part_bytes(self, path: str, parameter: Tensor) -> int:
        if self._part is None or not parameter.ndim:
            return parameter.nbytes
        return parameter[: self._part.rows(path, len(parameter))].nbytes

    def _num_experts(self, path: str, count: int) -> int:
        """The rank's of the experts of the module at this path."""
        return count if self._part is None else self._part.num_experts(path, count)


def _linear_kind(path: str) -> WeightKind:
    return WeightKind.EXPERTS if ".experts." in path else WeightKind.LINEAR


def _kind_by_name(name: str) -> WeightKind:
    """Of a weight that is no module's as it is."""
    is_expert = ".experts." in name and not name.endswith("bias")
    return WeightKind.EXPERTS if is_expert else WeightKind.OTHER


def _matrix(module: nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
