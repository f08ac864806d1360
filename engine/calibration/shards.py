"""The names of a quantized checkpoint's files: one for each quantized layer, then the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from ..checkpoint.stored_tensors import StoredTensor
from .matrices import Matrices
from .recipe import Recipe

MAX_BYTES = 2 << 30
"""Of a file of tensors that stay as they are: memory holds one file while it is written."""
_SCALE_BYTES = 4
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


class Shards(NamedTuple):
    """All files of a checkpoint."""

    layers: Mapping[int, str]
    """By the quantized layer."""
    rest: Mapping[str, Sequence[str]]
    """The names of tensors that stay as they are, by file."""
    num_bytes: int
    """About what all of them take."""

    @property
    def names(self) -> list[str]:
        return [*self.layers.values(), *self.rest]


def plan_shards(stored: Mapping[str, StoredTensor], matrices: Matrices, recipe: Recipe) -> Shards:
    """The files of the checkpoint whose original has the tensors `stored`."""
    replaced = matrices.stored_names
    indices = [index for index, layer in enumerate(matrices.layers) if layer.stored_names]
    parts: list[list[str]] = [[]]
    filled = total = 0
    for name, tensor in stored.items():
        if name in replaced:
            total += _quantized_bytes(tensor, recipe)
            continue
        size = _num_bytes(tensor)
        if parts[-1] and filled + size > MAX_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
        total += size
    count = len(indices) + len(parts)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return Shards(
        dict(zip(indices, names, strict=False)),
        dict(zip(names[len(indices) :], parts, strict=True)),
        total,
    )


def _num_bytes(tensor: StoredTensor) -> int:
    return prod(tensor.shape) * _BYTES.get(tensor.dtype, 1)


def _quantized_bytes(tensor: StoredTensor, recipe: Recipe) -> int:
    out_features, in_features = tensor.shape
    scales = -(-in_features // recipe.group(in_features)) * _SCALE_BYTES
    return out_features * (in_features * recipe.grid.code_type.bits // 8 + scales)
