"""Adds a draft head to the files of an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...adapters.export import CONFIG_NAME, WEIGHTS_NAME
from ...adapters.tensor_names import DRAFT_HEAD_PREFIX
from ..errors import InvalidParameter
from .eagle_checkpoint import EagleCheckpoint
from .head_values import values_of

BESIDE = (CONFIG_NAME, "config.json", "tokenizer.json", "tokenizer_config.json")
"""What a push reads beside the weights."""


def attach_head(loaded: EagleCheckpoint, adapter: Path, out: Path) -> None:
    """Write the adapter into the folder `out`, with this head in place of any that it has, in the
    dtype that the adapter's tensors share.

    Raises InvalidParameter if the adapter cannot be read, or if the head has its own embedding.
    """
    if loaded.embedding is not None:
        raise InvalidParameter("head", "it has an embedding of its own")
    try:
        stored = load_file(adapter / WEIGHTS_NAME)
    except (OSError, SafetensorError) as exc:
        raise InvalidParameter("adapter", f"{adapter / WEIGHTS_NAME}: {exc}") from exc
    tensors = {name: each for name, each in stored.items() if not _is_head(name)}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    values = values_of(loaded.head)
    if len(dtypes) == 1:
        values = values.to(dtypes.pop())
    tensors[f"{DRAFT_HEAD_PREFIX}{loaded.head_id}"] = values
    for name in BESIDE:
        if (adapter / name).is_file():
            shutil.copyfile(adapter / name, out / name)
    save_file(tensors, out / WEIGHTS_NAME, metadata={"format": "pt"})


def _is_head(name: str) -> bool:
    return name.startswith(DRAFT_HEAD_PREFIX)
