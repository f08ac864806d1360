"""Writes quantized weights as the compressed-tensors library does, for vLLM and transformers too.

`pack-quantized` for integers, `float-quantized` for fp8. `checkpoint/packed_weights.py` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.quantized_weight import CodeType, QuantizedWeight
from ..checkpoint.packed_weights import WORD_BITS
from .method import CodeFormat
from .recipe import Recipe

_PIECE_ROWS = 256


def stored_parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a linear layer's weight, by the ends of their names."""
    if weight.code_type is CodeType.FP8:
        codes = weight.codes.view(torch.float8_e4m3fn)
        return {"weight": codes.cpu(), "weight_scale": weight.scale.cpu()}
    return {
        "weight_packed": _words(weight.codes, weight.code_type.bits).cpu(),
        "weight_scale": weight.scale.cpu(),
        "weight_shape": torch.tensor(weight.shape),
    }


def quantization_config(recipe: Recipe, ignored: Sequence[str]) -> Mapping[str, Any]:
    """The `quantization_config` of `config.json`. `ignored`: what is left as it is."""
    is_float = recipe.code_format is CodeFormat.FP8
    form = "float-quantized" if is_float else "pack-quantized"
    is_by_output = is_float or recipe.group_size == 0
    weights = {
        "num_bits": 4 if recipe.code_format is CodeFormat.INT4 else 8,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if is_by_output else "group",
        "group_size": None if is_by_output else recipe.group_size,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 `[out, words]` of `codes [out, in]`: numbers from 0 on, the lowest bits first."""
    per_word = WORD_BITS // bits
    shifts = torch.arange(per_word, device=codes.device) * bits
    pieces = []
    for rows in codes.split(_PIECE_ROWS):
        numbers = rows.to(torch.int64) + (1 << (bits - 1))
        numbers = F.pad(numbers, (0, -numbers.shape[1] % per_word)).unflatten(1, (-1, per_word))
        words = (numbers << shifts).sum(dim=-1)
        pieces.append(words.to(torch.uint32).view(torch.int32))
    return torch.cat(pieces)
