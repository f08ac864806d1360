"""The format of a quantized checkpoint, from its headers."""

from __future__ import annotations

from pathlib import Path

from ..gguf.header import GGUF_FILE, quantized_kind
from .base_config import read_config_file
from .packed_weights import find_packed_weights
from .stored_tensors import read_stored_tensors


def find_packed_format(folder: Path) -> str | None:
    """The format of most quantized weights of the base in this folder; None if it has none.

    Raises a subclass of UnsupportedModel for files that cannot be read.
    """
    if (folder / GGUF_FILE).exists():
        return quantized_kind(folder / GGUF_FILE)
    tensors = read_stored_tensors(folder)
    return find_packed_weights(tensors, read_config_file(folder), folder).format
