"""Where a base model's files are."""

from __future__ import annotations

from pathlib import Path

from .errors import UnsupportedModel

FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""What is taken of a hub repository: no code, no pickles."""


def locate_model(model: str) -> Path:
    """A local directory, or the local snapshot of a hub id, downloaded if need be.

    Raises UnsupportedModel if `model` is neither, or has no `config.json`.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _check_folder(path)
    if model.startswith((".", "~", "/")) or model.count("/") != 1:
        raise UnsupportedModel(f"{model} is no folder here, and no hub id such as owner/name")
    return _check_folder(_download(model))


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except Exception as exc:  # the hub's own errors, its transport's, and the disk's
        reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        raise UnsupportedModel(
            f"{model} is no folder here, and the hub did not give it: {reason}"
        ) from exc


def _check_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    if (path / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{path} holds an adapter, not a base model: serve its base, then push the adapter"
        )
    raise UnsupportedModel(f"{path} has no config.json: it is no model in the Hugging Face layout")
