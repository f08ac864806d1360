"""Digests of the matrices that PEFT may copy into an adapter: embedding and output head.

Intake uses them to distinguish an unchanged copy of the base's matrix from a trained one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .file_slices import DTYPES, FileSlices
from .stored_tensors import read_header

_PIECE_ROWS = 128
NUM_PREFIXES = 512
"""Of bases whose tables are padded, tokenizers have up to some hundred tokens less than rows."""


def end_digests(model: PreTrainedModel, model_dir: Path) -> dict[str, list[str]]:
    """Module name to hex SHA-256s of its weight: see `BaseLayout.digests`.

    It uses the checkpoint's own values, because those in memory may be rounded. A module whose
    weight is in none of the files is omitted.
    """
    names = {module: name for name, module in model.named_modules()}
    digests: dict[Tensor, list[str] | None] = {}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for module in ends:
        if module.weight not in digests:  # by identity: tied ends share theirs
            digests[module.weight] = _digest(module.weight, model_dir)
    found = {names[module]: digests[module.weight] for module in ends}
    return {name: digest for name, digest in found.items() if digest is not None}


def _digest(weight: Tensor, model_dir: Path) -> list[str] | None:
    """The digests of the stored tensor from which `weight` was loaded, whatever its name."""
    if weight.is_meta:
        return None
    for path in sorted(model_dir.glob("*.safetensors")):
        for key, header in read_header(path):
            is_alike = header.dtype in DTYPES and header.shape == tuple(weight.shape)
            if is_alike and (digest := _hash(FileSlices(path, key), weight)):
                return digest
    return None


def _hash(stored: FileSlices, weight: Tensor) -> list[str] | None:
    """None if the weight, loaded from this tensor, would have other values."""
    hasher, num_rows = hashlib.sha256(), weight.shape[0]
    digests: list[str] = []
    for start in range(0, num_rows, _PIECE_ROWS):
        own = slice(start, start + _PIECE_ROWS)
        piece, loaded = stored[own], weight[own].detach().cpu()
        if not torch.equal(piece.to(loaded.dtype), loaded):
            return None
        rows = piece.to(torch.float32).contiguous().numpy()
        whole = max(0, min(len(rows), num_rows - NUM_PREFIXES - start))
        hasher.update(rows[:whole].data)
        for row in rows[whole:]:
            hasher.update(row.data)
            digests.append(hasher.hexdigest())
    return digests[::-1]
