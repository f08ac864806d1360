"""Medusa heads on disk: `config.json` and safetensors with the original tensor names."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from .head_folder import HeadFolder
from .medusa_heads import MedusaHeads, assembled, named_tensors, tensor_shapes

WEIGHTS_NAME = "medusa_lm_head.safetensors"
_MAX_HEADS = 64
_MAX_LAYERS = 16


def save_heads(heads: MedusaHeads, path: Path, *, base_id: str) -> None:
    """Write the heads, and which base they were trained for, into the folder `path`."""
    num_heads, vocab_size, hidden_size = heads.projections.shape
    config = {
        "base_id": base_id,
        "hidden_size": hidden_size,
        "medusa_num_heads": num_heads,
        "medusa_num_layers": len(heads.weights),
        "vocab_size": vocab_size,
    }
    _folder(path).write(config, WEIGHTS_NAME, named_tensors(heads))


def load_heads(
    path: Path, *, hidden_size: int, vocab_size: int, base_id: str, dtype: torch.dtype
) -> MedusaHeads:
    """The heads in the folder `path`, for a base with these sizes, on the CPU in `dtype`.

    Raises InvalidParameter if they cannot be read or are another base's.
    """
    folder = _folder(path)
    form = _read_form(folder, hidden_size=hidden_size, vocab_size=vocab_size, base_id=base_id)
    tensors = folder.read_tensors()
    folder.check_tensors(tensors, form.shapes)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    heads = assembled(tensors, num_heads=form.num_heads, num_layers=form.num_layers)
    return heads.requires_grad_(False)


def expected_values(path: Path, *, hidden_size: int, vocab_size: int) -> int:
    """The number of values that `load_heads` would load. Raises InvalidParameter as it does for
    everything but the tensors and the base's identity."""
    form = _read_form(_folder(path), hidden_size=hidden_size, vocab_size=vocab_size, base_id=None)
    return sum(map(prod, form.shapes.values()))


class _Form(NamedTuple):
    num_heads: int
    num_layers: int
    shapes: dict[str, tuple[int, ...]]
    """By the tensors' names."""


def _read_form(
    folder: HeadFolder, *, hidden_size: int, vocab_size: int, base_id: str | None
) -> _Form:
    config = folder.read_config()
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    folder.check_base(config, sizes, base_id=base_id)
    num_heads = folder.number(config, "medusa_num_heads", _MAX_HEADS)
    num_layers = folder.number(config, "medusa_num_layers", _MAX_LAYERS)
    shapes = tensor_shapes(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )
    return _Form(num_heads, num_layers, dict(shapes))


def _folder(path: Path) -> HeadFolder:
    return HeadFolder("medusa heads", path)
