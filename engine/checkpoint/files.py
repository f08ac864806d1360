"""Finds a base model's files and checks that they are complete.

Imports no torch and reads no weights, because it runs before everything that takes time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from ..config import source_of
from ..errors import BaseNotFound, ForeignBase, UnsupportedModel
from ..gguf.header import GGUF_FILE
from .base_config import CONFIG_FILE, check_companions, check_config, read_config_file
from .packed_weights import find_packed_weights
from .stored_tensors import check_stored_tensors, foreign_weights, read_stored_tensors
from .text_part import of_text_part, text_settings

DRAFT = "draft"
"""The source of the proposers with a model, such as `draft:MODEL`: see `source_of`."""
CONFIG_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
FILES = (*CONFIG_FILES, "*.safetensors")
"""The files that are downloaded from a hub repository: no code, no pickles."""


def locate_base(model: str) -> Path:
    """The folder of a base model with complete files; a hub id is downloaded if necessary.

    Raises a subclass of UnsupportedModel with the reason.
    """
    if folder := local_folder(model):
        check_base(folder)
        return folder
    check_base_config(_download(model, CONFIG_FILES))  # before gigabytes are downloaded
    folder = _download(model, FILES)
    check_base(folder)
    return folder


@contextmanager
def naming_the_draft(model: str) -> Iterator[None]:
    """Make errors name this model as the draft model."""
    try:
        yield
    except UnsupportedModel as exc:
        raise type(exc)(f"draft model {model}: {exc}") from exc


def check_drafts(speculation: Iterable[str]) -> None:
    """Check the folders of draft models, as `locate_base` does."""
    for name, _, model in (entry.partition(":") for entry in speculation):
        if source_of(name) == DRAFT and model:
            with naming_the_draft(model):
                locate_base(model)


def locate_heads(model: str) -> Path:
    """The folder of Medusa heads, found in the same way; their loader checks the contents."""
    folder = local_folder(model) or _download(model, FILES)
    if not (folder / CONFIG_FILE).is_file():
        raise BaseNotFound(f"{folder} has no {CONFIG_FILE}")
    return folder


def check_base(folder: Path) -> None:
    """Check a base's configuration and the headers of its weights.

    Raises a subclass of UnsupportedModel with the reason.
    """
    check_base_config(folder)
    if (folder / GGUF_FILE).exists():
        return  # its header was checked when the folder was made
    config = read_config_file(folder)
    packed = find_packed_weights(read_stored_tensors(folder), config, folder)
    tensors = of_text_part(packed.tensors, config, folder)
    check_stored_tensors(tensors, text_settings(config), folder)


def check_base_config(folder: Path) -> None:
    """Check the contents of a base's small files. Raises a subclass of UnsupportedModel."""
    _check_kind(folder)
    check_config(read_config_file(folder), folder)
    check_companions(folder)


def download_config(model: str) -> Path:
    """The folder of a hub id's configuration, with the weights that were downloaded before. Raises
    BaseNotFound."""
    return _download(model, CONFIG_FILES)


def local_folder(model: str) -> Path | None:
    """The absolute path of a model's folder; None for a hub id. Raises BaseNotFound for anything
    else."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute()  # its files are opened later, and the program may change folders
    if path.suffix == ".gguf" and path.is_file():
        from ..gguf.folder import served_folder  # transformers takes a second

        return served_folder(path)
    if path.exists():
        raise BaseNotFound(
            f"{model} is a file: give the folder that holds {CONFIG_FILE}, or a .gguf file"
        )
    if model.startswith((".", "~", "/")) or model.count("/") != 1:
        raise BaseNotFound(
            f"{model} is neither a local directory nor a Hugging Face model ID (owner/name)"
            f"{_similar_folder(path)}"
        )
    return None


def _similar_folder(path: Path) -> str:
    """A hint at the folder beside `path` with the most similar name; empty without one."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1)
    return f". Did you mean {path.parent / near[0]}?" if near else ""


def _download(model: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except Exception as exc:  # the hub's own errors, its transport's, and the disk's
        reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        raise BaseNotFound(
            f"{model} is not a local directory, and it could not be downloaded: {reason}"
        ) from exc


def _check_kind(folder: Path) -> None:
    has_config = (folder / CONFIG_FILE).is_file()
    if (folder / "adapter_config.json").exists():
        if has_config:  # transformers would load the base that the adapter's own file names
            raise ForeignBase(
                f"{folder} holds an adapter beside a model: move the adapter to its own folder"
            )
        raise ForeignBase(
            f"{folder} holds an adapter, not a base model: serve its base, then push the adapter"
        )
    if not has_config:
        raise ForeignBase(
            foreign_weights(folder)
            if any(folder.glob("*.gguf"))
            else f"{folder} has no {CONFIG_FILE}: give a model in the Hugging Face layout"
        )
