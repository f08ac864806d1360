"""Loads a base for training, with the same quantized values that are served."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...adapters.malloc import return_freed_memory
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.files import locate_base
from ..checkpoint.packed_format import find_packed_format
from ..checkpoint.stored_weights import Values, dense
from ..checkpoint.weights import build_model, load_config, load_weights
from ..config import EngineConfig, Quantization
from ..errors import EngineError
from ..model.adapted_module import replace_module
from ..model.admission import check_config
from ..model.base_model import (
    are_packed_smaller,
    check_quantized_once,
    choose_device,
    choose_dtype,
    choose_quantization,
    decoder_linears,
    whole_weight,
)
from ..model.experts import experts_parameters
from ..model.latent_attention import replace_latents
from ..model.load_quantization import LoadQuantization
from ..model.weight_rows import whole_rows
from ..text.tokenizer import Tokenizer
from .errors import BaseNotTunable
from .frozen_linear import FrozenLinear


@dataclass(frozen=True)
class TunableBase:
    """A base whose own weights are frozen."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    device: torch.device
    max_model_len: int
    linears: frozenset[str]
    """The paths of the decoder's linear layers."""


def load_tunable_base(engine: EngineConfig) -> TunableBase:
    """The base that this configuration serves. Raises BaseNotTunable with the reason if it has
    weights that gradients cannot pass through, or if the engine does not load it."""
    try:
        return _load(engine)
    except EngineError as exc:
        raise BaseNotTunable(f"the base cannot be loaded: {exc}") from exc


def _load(engine: EngineConfig) -> TunableBase:
    model_dir = locate_base(engine.model)
    config = load_config(model_dir)
    max_model_len = check_config(config, max_model_len=engine.max_model_len)
    device = choose_device(engine.device)
    dtype = choose_dtype(engine.dtype, checkpoint=config.dtype, device=device)
    stored_format = find_packed_format(model_dir)
    check_quantized_once(engine, stored_format)
    if engine.embedding_quantization is not Quantization.NONE:
        raise BaseNotTunable("a base with --quantize-embeddings is not trained")
    is_quantized = stored_format is not None or engine.quantization is not Quantization.NONE
    is_smaller = are_packed_smaller(
        engine.quantization, stored_format, config.dtype, dtype=dtype, device=device
    )
    model = load_weights(
        model_dir, config, dtype, device, left_stored=decoder_linears if is_smaller else None
    )
    if is_quantized and any(True for _ in experts_parameters(model)):
        raise BaseNotTunable("a base with quantized experts is not trained")
    linears = decoder_linears(model)
    paths = frozenset(linears)
    _freeze(model, linears, choose_quantization(engine, config), dtype, device)
    return TunableBase(model, Tokenizer(model_dir), device, max_model_len, linears=paths)


def _freeze(
    model: PreTrainedModel,
    linears: dict[str, nn.Module],
    quantization: LoadQuantization,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Put every linear layer that is quantized, or is still in its file, into memory. Empties
    `linears`, so that each original is freed before the next one is read.

    A dense weight that is smaller in the dtype of its file stays so, as the engine keeps it.
    """
    with torch.device("meta"):
        kept_dense = set(replace_latents(build_model(model.config), has_values=False))
    for path in list(linears):
        module = linears.pop(path)
        if path in kept_dense:
            values: Values = dense(whole_rows(module), dtype=dtype, device=device)
        else:
            values = whole_weight(path, module, quantization)
        if isinstance(values, QuantizedWeight) or _is_in_file(module):
            bias = module.bias.detach() if isinstance(module.bias, Tensor) else None
            replace_module(model, path, FrozenLinear(values, bias, dtype))
        del module, values
        return_freed_memory()


def _is_in_file(module: nn.Module) -> bool:
    assert isinstance(module.weight, Tensor)
    return module.weight.is_meta
