"""Where a base model's files are."""

from __future__ import annotations

from pathlib import Path

from .errors import UnsupportedModel

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is taken of a hub repository: no code, no pickles."""


def locate_model(model: str) -> Path:
    """A local directory, or the local snapshot of a hub id, downloaded if need be.

    Raises UnsupportedModel if `model` is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.count("/") != 1 or path.is_absolute():
        raise UnsupportedModel(f"{model} is neither a directory nor a hub id")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=list(FILES)))
