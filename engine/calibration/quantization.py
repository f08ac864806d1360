"""Quantizes a checkpoint layer by layer, with the activations of a calibration text.

One forward pass leads through the decoder's layers (`decoder_walk.py`). At each layer all samples
are run through it, its matrices are quantized and written, and the samples are run through it
again: the next layer is calibrated with what the quantized layers before it give. Memory holds one
layer's weights in fp32, the samples' hidden states before and after it, and what is in neither
linear layers nor experts, such as the embedding. A run that is continued only runs the samples
through the finished layers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from errno import ENOSPC
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..checkpoint.base_config import read_config_file
from ..checkpoint.base_identity import compute_base_id
from ..checkpoint.packed_format import find_packed_format
from ..checkpoint.stored_tensors import StoredTensor, read_stored_tensors
from ..checkpoint.text_part import is_composite
from ..checkpoint.weights import load_config, load_weights
from ..errors import CompositeBase, QuantizedBase
from ..gguf.header import GGUF_FILE
from ..model.base_model import decoder_linears
from ..model.experts import experts_parameters
from ..text.tokenizer import Tokenizer
from .calibration_text import CalibrationText, read_calibration_text
from .compressed_tensors import quantization_config
from .decoder_walk import DecoderWalk
from .layer_quantizer import LayerQuantizer, OnLayer, OnMatrices, States
from .matrices import choose_matrices
from .output_folder import OutputFolder
from .quality import Quality, compare
from .recipe import Recipe
from .shards import Shards, plan_shards


class Outcome(NamedTuple):
    """A quantized checkpoint beside its original."""

    errors: Mapping[int, float]
    """By layer: `‖outputs - original outputs‖ / ‖original outputs‖`, for the same inputs."""
    num_bytes: int
    original_bytes: int
    num_quantized: int
    """Matrices: linear layers, and those of experts."""
    num_in_experts: int
    """Of these, those of experts."""
    ignored: tuple[str, ...]
    """Linear layers, experts and routers that stay as they are."""
    quality: Quality


def quantize_model(
    model_dir: Path,
    out: Path,
    text: Path,
    recipe: Recipe,
    *,
    device: torch.device,
    on_layer: OnLayer = lambda _index, _count, _error: None,
    on_matrices: OnMatrices = lambda _done, _count: None,
) -> Outcome:
    """Write the quantized checkpoint of `model_dir` to `out`, or continue to.

    Raises a subclass of UnsupportedModel if the model cannot be quantized, InvalidParameter for an
    argument that does not fit it, and OSError if the disk refuses a file.
    """
    _check_original(model_dir)
    tokens = read_calibration_text(
        text,
        Tokenizer(model_dir),
        num_samples=recipe.num_samples,
        sequence_length=recipe.sequence_length,
    )
    config = load_config(model_dir)
    model = load_weights(
        model_dir,
        config,
        torch.float32,
        device,
        left_stored=decoder_linears,
        left_experts=experts_parameters,
    )
    walk = DecoderWalk(model)
    stored = read_stored_tensors(model_dir)
    matrices = choose_matrices(model, walk, stored, recipe)
    walk.check()
    shards = plan_shards(stored, matrices, recipe)
    output = OutputFolder(
        out,
        _arguments(model_dir, text, recipe),
        quantization_config(recipe, matrices.ignored),
    )
    _check_disk(output, shards)
    states = _first_states(walk, tokens, device)
    layers = LayerQuantizer(
        walk,
        matrices,
        shards,
        output,
        recipe,
        states,
        stored,
        _dtype(config),
        on_layer,
        on_matrices,
    )
    walk.run(tokens.samples[0], layers.visit)
    for name, tensors in shards.rest.items():
        if not output.has(name):
            left = [tensor for tensor in tensors if tensor not in layers.changed_norms]
            output.save(name, _read(model_dir, stored, left))
    quality = compare(walk, states.originals, states.held_out, tokens.held_out)
    outcome = Outcome(
        dict(output.errors),
        output.size_bytes(),
        sum((model_dir / file).stat().st_size for file in {t.file for t in stored.values()}),
        len(matrices.stored_names),
        sum(len(layer.experts) for layer in matrices.layers),
        tuple(matrices.ignored),
        quality,
    )
    output.finish(model_dir, shards.names)
    return outcome


def _first_states(walk: DecoderWalk, tokens: CalibrationText, device: torch.device) -> States:
    samples, held_out = (
        [walk.first_state(sample).cpu() for sample in part]
        for part in (tokens.samples, tokens.held_out)
    )
    return States(samples, held_out, originals=held_out, device=device)


def _check_original(model_dir: Path) -> None:
    """Raises QuantizedBase, or CompositeBase: the result would lack the other parts."""
    if is_composite(read_config_file(model_dir)):
        raise CompositeBase(f"{model_dir} is a composite model: give the text model alone")
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


def _dtype(config: Any) -> torch.dtype:
    """That of the scales: the checkpoint's own."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return config.dtype if config.dtype in known else torch.float32
