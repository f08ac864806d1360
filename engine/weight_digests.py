"""Digests of the matrices that PEFT may copy whole into an adapter: embedding and output head.

Intake tells by them a copy of the base's own matrix, which changes nothing, from a trained one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

_PIECE_ROWS = 1024


def end_digests(model: PreTrainedModel, model_dir: Path) -> dict[str, str]:
    """Module name to the hex SHA-256 of its weight: see `BaseLayout.digests`.

    Read from the checkpoint's own files, since the model in memory may be rounded. A module whose
    weight is in none of them under a name that leads to it is left out.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    digests = {}
    for module in (table, head):
        source = table if head.weight is table.weight else module
        if digest := _digest(model, source, names[source], model_dir):
            digests[names[module]] = digest
    return digests


def _digest(model: PreTrainedModel, module: nn.Module, name: str, model_dir: Path) -> str | None:
    """None if no file holds a weight of this module's shape under its name."""
    assert isinstance(module.weight, Tensor)
    prefix = f"{model.base_model_prefix}."
    # Checkpoints are saved with the prefix of the base class, or without it.
    names = {f"{name}.weight", f"{name.removeprefix(prefix)}.weight", f"{prefix}{name}.weight"}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in names & set(file.keys()):
                pieces = file.get_slice(key)
                if pieces.get_shape() == list(module.weight.shape):
                    return _hash(
                        pieces[start : start + _PIECE_ROWS]
                        for start in range(0, module.weight.shape[0], _PIECE_ROWS)
                    )
    return None


def _hash(pieces: Iterator[Tensor]) -> str:
    hasher = hashlib.sha256()
    for piece in pieces:
        hasher.update(piece.to(torch.float32).contiguous().numpy().data)
    return hasher.hexdigest()
