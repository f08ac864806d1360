"""Quantizes a decoder's layers one after another, or takes the finished ones from their files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.stored_weights import dense, keep_weight, weight_values
from ..errors import UnsupportedModel
from .awq import FoldableLayer, best_scale, foldable_norms
from .compressed_tensors import stored_parts
from .decoder_walk import DecoderWalk, Layer
from .gptq import quantize_gptq
from .grid import round_to_nearest
from .layer_inputs import LayerInputs
from .matrices import LayerMatrices, Matrices, stored_name
from .method import Method
from .output_folder import OutputFolder
from .recipe import Recipe
from .shards import Shards

OnLayer = Callable[[int, int, float | None], None]
"""Called after each layer with its index, the number of layers and its relative output error; None
where nothing is quantized."""
OnMatrices = Callable[[int, int], None]
"""Called with the number of matrices that are finished, and that of all."""


@dataclass
class States:
    """Hidden states `[1, length, hidden]` between two layers, fp32, in host memory."""

    samples: list[Tensor]
    held_out: list[Tensor]
    originals: list[Tensor]
    """Of the held-out samples, in the unquantized model."""
    device: torch.device
    """Where the layers run."""

    def after(self, layer: Layer, states: list[Tensor]) -> list[Tensor]:
        """What the layer makes of them."""
        return [layer(state.to(self.device)).cpu() for state in states]


class LayerQuantizer:
    """Quantizes the layers, or takes the finished ones from their files."""

    def __init__(
        self,
        walk: DecoderWalk,
        matrices: Matrices,
        shards: Shards,
        output: OutputFolder,
        recipe: Recipe,
        states: States,
        stored: Collection[str],
        dtype: torch.dtype,
        on_layer: OnLayer,
        on_matrices: OnMatrices,
    ) -> None:
        """stored: the names of the original's tensors. dtype: that of scales and norms."""
        self.changed_norms: set[str] = set()
        """Tensors that are in the layers' files, as AWQ changed them."""
        self._walk = walk
        self._matrices = matrices
        self._shards = shards
        self._output = output
        self._recipe = recipe
        self._states = states
        self._stored = stored
        self._dtype = dtype
        self._on_layer = on_layer
        self._on_matrices = on_matrices
        self._num_matrices = len(matrices.stored_names)
        self._num_finished = 0

    def visit(self, index: int, layer: Layer) -> None:
        """The walk's visit: all states move from before the layer to after it."""
        states, own = self._states, self._matrices.layers[index]
        with ExitStack() as held:
            weights = held.enter_context(_in_memory(own.stored_linears))
            for experts in own.stored_experts:
                held.enter_context(experts.in_memory())
            states.originals = states.after(layer, states.originals)
            if not own.stored_names:
                states.samples = states.after(layer, states.samples)
            elif index in self._output.errors:
                self._restore(index, own)
                states.samples = states.after(layer, states.samples)
            else:
                self._quantize(index, own, layer, weights)
            states.held_out = states.after(layer, states.held_out)
        self._on_layer(index, len(self._matrices.layers), self._output.errors.get(index))

    def _restore(self, index: int, own: LayerMatrices) -> None:
        values = self._output.load_layer(self._shards.layers[index])
        for module in own.linears.values():
            weight = values[stored_name(module)]
            keep_weight(module, dense(weight, dtype=torch.float32, device=self._states.device))
        for experts in own.stored_experts:
            for path in experts.matrices.keys() & own.experts:
                experts.set(path, values[f"{path}.weight"])
        self._advance(len(own.stored_names))
        for name, norm in self._norms(index).items():
            changed = values.get(f"{name}.weight")
            if isinstance(changed, Tensor):
                norm.weight.data.copy_(changed)  # type: ignore[operator]
                self.changed_norms.add(f"{name}.weight")

    def _quantize(
        self, index: int, own: LayerMatrices, layer: Layer, weights: Mapping[str, Tensor]
    ) -> None:
        states, inputs, tensors = self._states, LayerInputs(), dict[str, Tensor]()
        with inputs.watching(own.linears), ExitStack() as watched:
            for experts in own.stored_experts:
                if own.experts and self._recipe.method is Method.GPTQ:
                    watched.enter_context(experts.watching())
            expected = states.after(layer, states.samples)
        if self._recipe.method is Method.AWQ:
            tensors |= self._scaled(index, own, layer, inputs, weights)
        for name, module in own.linears.items():
            weight = weights[name]
            quantized = self._rounded(weight, inputs.hessian(name, weight))
            keep_weight(module, quantized.dequantize())
            tensors |= _stored(stored_name(module).removesuffix(".weight"), quantized)
            self._advance(1)
        for experts in own.stored_experts:
            for path, quantized in experts.quantize(own.experts, self._rounded):
                tensors |= _stored(path, quantized)
                self._advance(1)
        states.samples = states.after(layer, states.samples)
        error = _relative_error(states.samples, expected)
        self._output.save_layer(index, self._shards.layers[index], tensors, error=error)

    def _advance(self, count: int) -> None:
        self._num_finished += count
        self._on_matrices(self._num_finished, self._num_matrices)

    def _rounded(self, weight: Tensor, hessian: Tensor | None) -> QuantizedWeight:
        recipe, group = self._recipe, self._recipe.group(weight.shape[1])
        if recipe.method is not Method.GPTQ or hessian is None:
            return round_to_nearest(weight, recipe.grid, group=group, dtype=self._dtype)
        return quantize_gptq(
            weight, hessian, recipe.grid, group=group, dtype=self._dtype, act_order=recipe.act_order
        )

    def _scaled(
        self,
        index: int,
        own: LayerMatrices,
        layer: Layer,
        inputs: LayerInputs,
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Fold AWQ's scales into `weights`; returns the norms that changed, as they are stored."""
        quantized = {name: weights[name] for name in own.linears}
        foldable = FoldableLayer(layer, self._norms(index), own.linears, quantized)
        state = self._states.samples[0].to(self._states.device)
        folds = foldable.folds(inputs.siblings(), state)
        if not folds and not self._output.errors:
            raise UnsupportedModel(
                "awq: the scales of this model cannot be folded into other weights exactly; use "
                "--method gptq"
            )
        changed: dict[str, Tensor] = {}
        for fold in folds:
            first = fold.readers[0]
            magnitude = inputs.magnitude(first)
            scale = best_scale(
                [quantized[reader] for reader in fold.readers],
                inputs.hessian(first, quantized[first]),
                magnitude,
                self._recipe.grid,
                group=self._recipe.group(len(magnitude)),
                dtype=self._dtype,
            )
            foldable.apply(fold, scale, self._dtype)
            if (norm := foldable.norm(fold)) is not None:
                changed[f"{fold.source}.weight"] = norm.to(self._dtype).cpu()
        self.changed_norms |= changed.keys()
        return changed

    def _norms(self, index: int) -> dict[str, nn.Module]:
        """The layer's norms that are stored under their own name."""
        norms = foldable_norms(self._walk.layers[index], f"{self._walk.path}.{index}")
        return {name: norm for name, norm in norms.items() if f"{name}.weight" in self._stored}


def _stored(path: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    return {f"{path}.{end}": part for end, part in stored_parts(weight).items()}


@contextmanager
def _in_memory(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The weights of these, fp32, with which they compute meanwhile: they are read once for all
    samples."""
    weights: dict[str, Tensor] = {}
    for name, module in modules.items():
        stored = weight_values(module)
        assert isinstance(stored, Tensor)
        weights[name] = stored.to(torch.float32, copy=True)
        keep_weight(module, weights[name])
    try:
        yield weights
    finally:
        for module in modules.values():
            keep_weight(module, None)


def _relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return sqrt(wrong / sum(float(b.square().sum()) for b in expected))
