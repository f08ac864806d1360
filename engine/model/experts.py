"""The experts of MoE layers, with each token's adapter applied to every expert it is routed to.

transformers stores a layer's experts in two parameters, `gate_up_proj` (or `up_proj`) and
`down_proj`, each with a matrix per expert. Classes that implement its experts interface describe
the storage in attributes and the operation between the two in `_apply_gate`. Only these are used:
routing, base matmuls and LoRA deltas are Loraplex's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...adapters.layout import Halves, Projection, Slice, SliceKind
from ...adapters.malloc import return_freed_memory
from ...kernels.expert_packing import pack_experts
from ...kernels.expert_pairs import ExpertPairs, sort_held_pairs, sort_pairs
from ...kernels.grouped_linear import grouped_linear
from ...kernels.lora_batch import LoraBatch
from ...kernels.lora_experts import add_experts
from ...kernels.packed_experts import PackedExperts
from ...kernels.quantize import WeightFormat, quantize
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.load_progress import report_progress
from ..checkpoint.stored_experts import ExpertsParameter, LeftExperts, left_experts
from ..checkpoint.stored_weights import Values
from .expert_router import RouterProjection, find_routers
from .expert_shards import ExpertShards
from .forward import ForwardContext, current_forward
from .load_quantization import LoadQuantization

if TYPE_CHECKING:
    from ...adapters.arena import Arena

_INTERFACE = (
    "has_gate",
    "has_bias",
    "is_transposed",
    "is_concatenated",
    "_apply_gate",
    "num_experts",
)
"""The attributes that transformers gives every class with its experts interface."""


class ExpertsProjection:
    """One of the two expert parameters of a layer and its position in the adapters' tables."""

    def __init__(
        self, name: str, experts: nn.Module, parameter: str, held: range | None = None
    ) -> None:
        """name: the parameter's path in the model; parameter: its name in `experts`. held: this
        rank's experts; None: all of the layer."""
        self._experts: Any = experts
        self._parameter = parameter
        num_experts, out_features, in_features = matrices_shape(experts, parameter)
        part = Slice(
            name,
            in_features,
            out_features,
            SliceKind.EXPERTS,
            num_experts,
            halves=_halves(experts, parameter),
            is_turned=getattr(experts, "is_turned", False),
        )
        self.held = held or range(num_experts)
        """This rank's experts."""
        self.whole = Projection((part,))
        """All experts of the layer."""
        self.projection = Projection((replace(part, num_experts=len(self.held)),))
        self.rounded: PackedExperts | None = None
        """The same matrices in fewer bits, for the base's own drafts; None without them."""
        self.multiplies_rounded = False
        """Whether `rounded` is multiplied in place of `weight`."""
        self._arena: Arena | None = None
        self._slice_index = 0

    @property
    def weight(self) -> Tensor | PackedExperts:
        """Packed; or `[experts, out, in]`, `[experts, in, out]` if the class sets
        `is_transposed`."""
        weight = getattr(self._experts, self._parameter)
        assert isinstance(weight, Tensor | PackedExperts)
        return weight

    def pack(self, quantization: LoadQuantization, rounded: WeightFormat | None = None) -> None:
        """Keep the matrices of this rank's experts as they are multiplied.

        If they were left in their files, they are read now, each expert's by itself, and are
        quantized as in the files or as asked for. What has no packed form becomes dense.
        rounded: a format in which they are packed once more, if it is multiplied on this device.
        """
        left = left_experts(self._experts)
        if left is None or self._parameter not in left.stored:
            if rounded is not None:
                self._round(self._in_memory(), rounded, self._loaded.device)
            self._cut(self._parameter)
        else:
            left.stop()
            if rounded is not None:
                self._round(self._values(left, quantization), rounded, left.device)
            self._read(left, quantization)
        if self._experts.has_bias:
            self._cut(f"{self._parameter}_bias")

    def _read(self, left: LeftExperts, quantization: LoadQuantization) -> None:
        values = self._values(left, quantization)
        packed = pack_experts(values, len(self.held), device_type=left.device.type)
        self._keep(self._parameter, packed or left.part(self._parameter, self.held))

    def _values(self, left: LeftExperts, quantization: LoadQuantization) -> Iterator[Values]:
        """The matrix `[out, in]` of each of this rank's experts, as it is served."""
        (experts,) = self.projection.slices
        for matrix in left.matrices(self._parameter, self.held):
            yield quantization.apply(experts.name, matrix)

    @property
    def _loaded(self) -> Tensor:
        """The parameter before it is packed."""
        weight = self.weight
        assert isinstance(weight, Tensor)
        return weight

    def _in_memory(self) -> Iterator[Values]:
        """As `_values`, of a parameter that was loaded."""
        for expert in self.held:
            matrix = self._loaded[expert].detach()
            yield matrix.T if self._experts.is_transposed else matrix

    def _round(
        self, matrices: Iterator[Values], weight_format: WeightFormat, device: torch.device
    ) -> None:
        exact = (
            each.dequantize() if isinstance(each, QuantizedWeight) else each for each in matrices
        )
        rounded = (quantize(matrix, weight_format) for matrix in exact)
        self.rounded = pack_experts(rounded, len(self.held), device_type=device.type)

    def _cut(self, name: str) -> None:
        """Keep this rank's part of a parameter in memory, `[experts, ...]`."""
        parameter: Tensor = getattr(self._experts, name)
        if len(self.held) < len(parameter):
            held = parameter.detach()[self.held.start : self.held.stop].clone()
            self._keep(name, nn.Parameter(held, requires_grad=False))

    def _keep(self, name: str, value: nn.Module | nn.Parameter) -> None:
        delattr(self._experts, name)
        setattr(self._experts, name, value)

    @property
    def num_rows(self) -> int:
        """The length of the adapters' table; a graph is captured again if it changes."""
        return 0 if self._arena is None else self._arena.table.shape[0]

    def attach(self, arena: Arena, slice_range: range) -> None:
        """From now on, pairs of the step's adapters get their LoRA delta from this arena."""
        self._arena = arena
        self._slice_index = slice_range.start

    def forget_adapter(self, row: int) -> None:
        """Nothing to do: no copy of an expert's A and B is kept outside of the arena."""

    def forget_step(self) -> None:
        """Nothing to do: no tensor outlives a layer."""

    def is_touched(self, lora: LoraBatch) -> bool:
        """Whether any adapter of the step changes these experts; of a captured step, whether one
        may."""
        if self._arena is None:
            return False
        if lora.launches_experts:
            return True
        tables = self._arena.row_tables
        return any(tables[row][self._slice_index][2] for row in lora.adapter_rows)

    def apply(self, x: Tensor, pairs: ExpertPairs, lora: LoraBatch | None) -> Tensor:
        """`x [num_pairs, in]` through each pair's own expert, its bias and its adapter."""
        experts = self._experts
        bias = getattr(experts, f"{self._parameter}_bias") if experts.has_bias else None
        weight = self.weight
        if self.multiplies_rounded and self.rounded is not None:
            weight = self.rounded
        y = grouped_linear(x, weight, pairs, bias=bias, is_transposed=experts.is_transposed)
        if lora is not None and self._arena is not None:
            add_experts(x, y, self._arena, self._slice_index, pairs, lora)
        return y


class ServedExperts:
    """Computes one layer's experts in place of their class's own forward."""

    def __init__(self, path: str, module: nn.Module, shards: ExpertShards | None = None) -> None:
        """From now on this object computes `module`, whose path in the model is `path`. shards:
        divides the experts among ranks; None: all are here."""
        self._module: Any = module
        self._shards = shards
        held = shards.held(path) if shards else None
        first, second = parameter_names(module)
        self.up = ExpertsProjection(f"{path}.{first}", module, first, held)
        self.down = ExpertsProjection(f"{path}.{second}", module, second, held)
        module.__dict__["forward"] = self.forward  # the module's other attributes remain

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[num_tokens, hidden]`: each token through the experts chosen for it, weighted and added.

        hidden_states: `[num_tokens, hidden]`. top_k_index, top_k_weights: `[num_tokens, top_k]`.
        """
        module, step = self._module, current_forward.get()
        lora = self._touching_lora(step)
        pairs = self._pairs(top_k_index, step, lora)
        x, weights = hidden_states[pairs.tokens], top_k_weights.reshape(-1)[pairs.order, None]
        weights_inputs = getattr(module, "weights_inputs", False)
        y = self.up.apply(x * weights if weights_inputs else x, pairs, lora)
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = self.down.apply(y, pairs, lora)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        y = y if weights_inputs else y * weights
        shape = top_k_index.numel(), y.shape[1]
        by_choice = y.new_zeros(shape) if self._shards else y.new_empty(shape)
        by_choice.index_copy_(0, pairs.order, y)
        summed = by_choice.view(*top_k_index.shape, -1).sum(dim=1)
        if self._shards:
            summed = self._shards.whole(summed)
        return summed.to(hidden_states.dtype)

    def _pairs(
        self, top_k_index: Tensor, step: ForwardContext | None, lora: LoraBatch | None
    ) -> ExpertPairs:
        """The pairs of this rank's experts."""
        token_rows = lora.token_rows if lora else None
        if self._shards:
            return sort_held_pairs(top_k_index, self.up.held, token_rows, self.up.num_rows)
        return sort_pairs(
            top_k_index,
            len(self.up.held),
            token_rows,
            self.up.num_rows,
            is_captured=step is not None and step.is_captured,
        )

    def _touching_lora(self, step: ForwardContext | None) -> LoraBatch | None:
        """The step's adapters; None if none of them changes this layer's experts."""
        lora = step.lora if step else None
        if lora and (self.up.is_touched(lora) or self.down.is_touched(lora)):
            return lora
        return None


@dataclass(frozen=True)
class MoeLayer:
    """One layer with served experts, and its router if it has a separate one."""

    path: str
    """The path of the experts' module."""
    modules: frozenset[nn.Module]
    """The modules that hold the served matrices."""
    projections: tuple[RouterProjection | ExpertsProjection, ...]
    """In the order of execution."""

    @property
    def experts(self) -> list[ExpertsProjection]:
        return [part for part in self.projections if isinstance(part, ExpertsProjection)]

    @property
    def wholes(self) -> list[Projection]:
        """What all ranks hold of its projections, in the same order."""
        return [
            part.whole if isinstance(part, ExpertsProjection) else part.projection
            for part in self.projections
        ]


def replace_experts(model: nn.Module, shards: ExpertShards | None = None) -> list[MoeLayer]:
    """Replace the forward methods of experts and routers that support adapters.

    For a model as transformers loads it. Modules that are not in the result are unchanged. shards:
    divides the experts among ranks, from `pack_moe_layers` on.
    """
    experts = served_experts(model)
    routers = find_routers(model, experts)
    return [_replace_layer(model, path, routers.get(path), shards) for path in experts]


def served_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that `replace_experts` replaces, by their paths."""
    return {path: module for path, module in model.named_modules() if are_served(module)}


def pack_moe_layers(
    layers: Sequence[MoeLayer],
    quantization: LoadQuantization,
    rounded: WeightFormat | None = None,
) -> None:
    """Pack the experts, one parameter after another; once more in the format of `rounded`."""
    parts = [part for layer in layers for part in layer.experts]
    with report_progress("packing experts", len(parts)) as advance:
        for part in parts:
            part.pack(quantization, rounded)
            return_freed_memory()
            advance()


def experts_parameters(model: nn.Module) -> Iterator[ExpertsParameter]:
    """The matrices of all experts that `replace_experts` replaces."""
    for path, module in served_experts(model).items():
        experts: Any = module
        for name in parameter_names(module):
            yield ExpertsParameter(path, name, experts.is_transposed)


def matrices_shape(experts: Any, parameter: str) -> tuple[int, int, int]:
    """`[experts, out, in]` of a parameter, packed or not."""
    weight = getattr(experts, parameter)
    num_experts, rows, columns = weight.shape
    is_turned = experts.is_transposed and not isinstance(weight, PackedExperts)
    return (num_experts, columns, rows) if is_turned else (num_experts, rows, columns)


def _halves(experts: Any, parameter: str) -> Halves:
    if not experts.has_gate or parameter != parameter_names(experts)[0]:
        return Halves.NONE
    return Halves.JOINED if experts.is_concatenated else Halves.INTERLEAVED


def _replace_layer(
    model: nn.Module, path: str, router_path: str | None, shards: ExpertShards | None
) -> MoeLayer:
    experts = model.get_submodule(path)
    served = ServedExperts(path, experts, shards)
    if router_path is None:
        return MoeLayer(path, frozenset({experts}), (served.up, served.down))
    router = model.get_submodule(router_path)
    projections = (RouterProjection(router_path, router), served.up, served.down)
    return MoeLayer(path, frozenset({experts, router}), projections)


def are_served(module: nn.Module) -> bool:
    """Whether the module is of the experts interface, its parameters 3-D."""
    if not all(hasattr(module, name) for name in _INTERFACE):
        return False
    weights = [getattr(module, name, None) for name in parameter_names(module)]
    return all(
        isinstance(weight, Tensor | PackedExperts) and len(weight.shape) == 3 for weight in weights
    )


def parameter_names(experts: Any) -> tuple[str, str]:
    """Of the matrices of a class with the experts interface."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
