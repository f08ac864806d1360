"""Quantizes a checkpoint layer by layer, with the activations of a calibration text.

One forward pass leads through the decoder's layers (`decoder_walk.py`). At each layer all samples
are run through it, its matrices are quantized and written, and the samples are run through it
again: the next layer is calibrated with what the quantized layers before it give. Memory holds one
layer's weights in fp32, the samples' hidden states before and after it, and what no linear layer
has, such as the embedding. A run that is continued only runs the samples through the finished
layers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from errno import ENOSPC
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.base_identity import compute_base_id
from ..checkpoint.stored_tensors import StoredTensor, read_stored_tensors
from ..checkpoint.stored_weights import (
    dense,
    find_packed_format,
    keep_weight,
    weight_values,
)
from ..checkpoint.weights import load_config, load_weights
from ..errors import QuantizedBase
from ..gguf.header import GGUF_FILE
from ..model.base_model import decoder_linears
from ..text.tokenizer import Tokenizer
from .calibration_text import read_calibration_text
from .compressed_tensors import quantization_config, stored_parts
from .decoder_walk import DecoderWalk, Layer
from .gptq import quantize_gptq
from .grid import round_to_nearest
from .layer_inputs import LayerInputs
from .matrices import LayerMatrices, Matrices, choose_matrices, stored_name
from .output_folder import OutputFolder
from .quality import Quality, compare
from .recipe import Method, Recipe
from .shards import Shards, plan_shards

OnLayer = Callable[[int, int, float | None], None]
"""Called after each layer with its index, the number of layers and its relative output error; None
where nothing is quantized."""


class Outcome(NamedTuple):
    """A quantized checkpoint beside its original."""

    errors: Mapping[int, float]
    """By layer: `‖outputs - original outputs‖ / ‖original outputs‖`, for the same inputs."""
    num_bytes: int
    original_bytes: int
    num_quantized: int
    """Linear layers."""
    ignored: tuple[str, ...]
    """Linear layers that stay as they are."""
    quality: Quality


def quantize_model(
    model_dir: Path,
    out: Path,
    text: Path,
    recipe: Recipe,
    *,
    device: torch.device,
    on_layer: OnLayer = lambda _index, _count, _error: None,
) -> Outcome:
    """Write the quantized checkpoint of `model_dir` to `out`, or continue to.

    Raises a subclass of UnsupportedModel if the model cannot be quantized, InvalidParameter for an
    argument that does not fit it, and OSError if the disk refuses a file.
    """
    _check_unquantized(model_dir)
    tokens = read_calibration_text(
        text,
        Tokenizer(model_dir),
        num_samples=recipe.num_samples,
        sequence_length=recipe.sequence_length,
    )
    config = load_config(model_dir)
    model = load_weights(model_dir, config, torch.float32, device, left_stored=decoder_linears)
    walk = DecoderWalk(model)
    matrices = choose_matrices(model, walk, recipe)
    walk.check()
    stored = read_stored_tensors(model_dir)
    shards = plan_shards(stored, matrices, recipe)
    output = OutputFolder(
        out,
        _arguments(model_dir, text, recipe),
        quantization_config(recipe, matrices.ignored),
    )
    _check_disk(output, shards)
    states = _States(
        samples=[walk.first_state(sample).cpu() for sample in tokens.samples],
        held_out=[walk.first_state(sample).cpu() for sample in tokens.held_out],
        originals=[walk.first_state(sample).cpu() for sample in tokens.held_out],
        device=device,
    )
    layers = _Layers(matrices, shards, output, recipe, states, on_layer)
    walk.run(tokens.samples[0], layers.visit)
    for name, tensors in shards.rest.items():
        if not output.has(name):
            output.save(name, _read(model_dir, stored, tensors))
    quality = compare(walk, states.originals, states.held_out, tokens.held_out)
    outcome = Outcome(
        dict(output.errors),
        output.size_bytes(),
        sum((model_dir / file).stat().st_size for file in {t.file for t in stored.values()}),
        len(matrices.stored_names),
        tuple(matrices.ignored),
        quality,
    )
    output.finish(model_dir, shards.names)
    return outcome


class _States:
    """Hidden states `[1, length, hidden]` between two layers, fp32, in host memory."""

    def __init__(
        self,
        *,
        samples: list[Tensor],
        held_out: list[Tensor],
        originals: list[Tensor],
        device: torch.device,
    ) -> None:
        self.samples = samples
        self.held_out = held_out
        self.originals = originals
        """Of the held-out samples, in the unquantized model."""
        self.device = device

    def after(self, layer: Layer, states: list[Tensor]) -> list[Tensor]:
        """What the layer makes of them."""
        return [layer(state.to(self.device)).cpu() for state in states]


class _Layers:
    """Quantizes the layers, or takes the finished ones from their files."""

    def __init__(
        self,
        matrices: Matrices,
        shards: Shards,
        output: OutputFolder,
        recipe: Recipe,
        states: _States,
        on_layer: OnLayer,
    ) -> None:
        self._matrices = matrices
        self._shards = shards
        self._output = output
        self._recipe = recipe
        self._states = states
        self._on_layer = on_layer

    def visit(self, index: int, layer: Layer) -> None:
        """The walk's visit: all states move from before the layer to after it."""
        states, own = self._states, self._matrices.layers[index]
        with _in_memory(own.stored):
            states.originals = states.after(layer, states.originals)
            if not own.quantized:
                states.samples = states.after(layer, states.samples)
            elif index in self._output.errors:
                self._restore(index, own)
                states.samples = states.after(layer, states.samples)
            else:
                self._quantize(index, own, layer)
            states.held_out = states.after(layer, states.held_out)
        self._on_layer(index, len(self._matrices.layers), self._output.errors.get(index))

    def _restore(self, index: int, own: LayerMatrices) -> None:
        values = self._output.load_layer(self._shards.layers[index])
        for module in own.quantized.values():
            weight = values[stored_name(module)]
            keep_weight(module, dense(weight, dtype=torch.float32, device=self._states.device))

    def _quantize(self, index: int, own: LayerMatrices, layer: Layer) -> None:
        states, inputs = self._states, LayerInputs()
        with inputs.watching(own.quantized):
            expected = states.after(layer, states.samples)
        tensors: dict[str, Tensor] = {}
        for name, module in own.quantized.items():
            quantized = self._rounded(module, inputs.hessian(name, module))
            keep_weight(module, quantized.dequantize())
            stem = stored_name(module).removesuffix(".weight")
            tensors |= {f"{stem}.{end}": part for end, part in stored_parts(quantized).items()}
        states.samples = states.after(layer, states.samples)
        error = _relative_error(states.samples, expected)
        self._output.save_layer(index, self._shards.layers[index], tensors, error=error)

    def _rounded(self, module: nn.Module, hessian: Tensor) -> QuantizedWeight:
        stored = weight_values(module)
        assert isinstance(stored, Tensor)
        weight, grid = stored.float(), self._recipe.grid
        group = self._recipe.group(weight.shape[1])
        if self._recipe.method is Method.RTN:
            return round_to_nearest(weight, grid, group=group, dtype=stored.dtype)
        return quantize_gptq(
            weight,
            hessian,
            grid,
            group=group,
            dtype=stored.dtype,
            act_order=self._recipe.act_order,
        )


@contextmanager
def _in_memory(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Meanwhile each of these has its weight in memory, fp32: it is read once for all samples."""
    for module in modules.values():
        stored = weight_values(module)
        assert isinstance(stored, Tensor)
        keep_weight(module, stored.float())
    try:
        yield
    finally:
        for module in modules.values():
            keep_weight(module, None)


def _relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return (wrong / sum(float(b.square().sum()) for b in expected)) ** 0.5


def _check_unquantized(model_dir: Path) -> None:
    if (model_dir / GGUF_FILE).exists():
        raise QuantizedBase(f"{model_dir} is a GGUF file: give the original checkpoint")
    if form := find_packed_format(model_dir):
        raise QuantizedBase(f"{model_dir} is quantized already ({form}): give the original")


def _arguments(model_dir: Path, text: Path, recipe: Recipe) -> dict[str, Any]:
    with text.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"model": compute_base_id(model_dir), "text": f"sha256:{digest}", **asdict(recipe)}


def _check_disk(output: OutputFolder, shards: Shards) -> None:
    """Raises OSError now rather than after hours."""
    if shards.num_bytes - output.size_bytes() > output.free_bytes():
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def _read(
    model_dir: Path, stored: Mapping[str, StoredTensor], names: Sequence[str]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in names:
        with safe_open(model_dir / stored[name].file, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors
