"""An adapter in a folder of this machine: of save_pretrained, or a checkpoint of a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from ..errors import InvalidAdapter
from .listing import Listing


def find_adapter(folder: Path) -> Path:
    """The folder, or the only one in it with an adapter. Raises InvalidAdapter."""
    if not folder.is_dir():
        raise _missing(folder)
    listing = Listing(frozenset(_paths(folder)), lambda below: str(folder / below))
    return folder / listing.choose("")


def _missing(folder: Path) -> InvalidAdapter:
    missing = InvalidAdapter(f"{folder} is not a folder. Give the one that save_pretrained wrote.")
    beside = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    if near := get_close_matches(folder.name, beside, n=1):
        return missing.with_hint(f"Did you mean {str(folder.with_name(near[0]))!r}?")
    if len(folder.parts) == 2 and not folder.is_absolute():
        return missing.with_hint(f"For the Hugging Face Hub write hf://{folder.as_posix()}.")
    return missing


def _paths(folder: Path) -> Iterator[str]:
    """The files in the folder and in its folders."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from (f"{entry.name}/{file.name}" for file in entry.iterdir())
        else:
            yield entry.name
