"""Medusa heads on disk: `config.json` and safetensors with the original tensor names."""

from __future__ import annotations

from pathlib import Path

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
    config = folder.read_config()
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    folder.check_base(config, sizes, base_id=base_id)
    num_heads = folder.number(config, "medusa_num_heads", _MAX_HEADS)
    num_layers = folder.number(config, "medusa_num_layers", _MAX_LAYERS)
    shapes = dict(
        tensor_shapes(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
        )
    )
    tensors = folder.read_tensors()
    folder.check_tensors(tensors, shapes)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return assembled(tensors, num_heads=num_heads, num_layers=num_layers).requires_grad_(False)


def _folder(path: Path) -> HeadFolder:
    return HeadFolder("medusa heads", path)
