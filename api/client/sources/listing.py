"""The files of a source: which of its folders holds the adapter that is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath

from ...local.adapter_folder import ADAPTER_FILES, CONFIG_FILE, WEIGHTS_FILE, missing_weights
from ..errors import InvalidAdapter, NotFound

CHECKPOINT_PREFIX = "checkpoint-"
MAX_NAMED = 8
"""Adapters in an error message."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The paths of a source's files, relative to its root, with slashes."""

    paths: Set[str]
    name_of: Callable[[str], str]
    """How the caller writes a folder of the source, such as `hf://acme/bot/sub`; "" is its root."""

    def choose(self, wanted: str) -> str:
        """The folder at or below `wanted` that holds an adapter.

        Raises NotFound if there is no such folder, with the most similar one, and InvalidAdapter if
        the folder holds no adapter or several.
        """
        if wanted and not self._below(wanted):
            raise self._missing(wanted)
        found = [wanted] if self._has(wanted, CONFIG_FILE) else self._adapters_below(wanted)
        if len(found) > 1:
            raise self._ambiguous(wanted, found)
        folder = found[0] if found else wanted
        if not self._has(folder, WEIGHTS_FILE) or not found:
            names = {
                path.name for path in map(PurePosixPath, self.paths) if _folder(path) == folder
            }
            raise InvalidAdapter(_explain(self.name_of(folder), names))
        return folder

    def files_of(self, folder: str) -> list[str]:
        """The paths of the adapter's files in the folder."""
        return [path for name in ADAPTER_FILES if (path := join(folder, name)) in self.paths]

    def _has(self, folder: str, name: str) -> bool:
        return join(folder, name) in self.paths

    def _below(self, folder: str) -> list[str]:
        return [path for path in self.paths if path.startswith(f"{folder}/")]

    def _adapters_below(self, wanted: str) -> list[str]:
        """The folders with an adapter's configuration, the newest checkpoint last."""
        paths = map(PurePosixPath, self._below(wanted) if wanted else self.paths)
        return sorted({_folder(path) for path in paths if path.name == CONFIG_FILE}, key=_age)

    def _missing(self, wanted: str) -> NotFound:
        near = get_close_matches(wanted, _folders(self.paths), n=1)
        missing = NotFound(f"Not found: {self.name_of(wanted)}")
        return missing.with_hint(f"Did you mean {self.name_of(near[0])!r}?") if near else missing

    def _ambiguous(self, wanted: str, found: list[str]) -> InvalidAdapter:
        named = ", ".join(found[-MAX_NAMED:])
        more = f"{len(found) - MAX_NAMED} more and " if len(found) > MAX_NAMED else ""
        word = "the newest" if _age(found[-1])[0] >= 0 else "one of them"
        return InvalidAdapter(
            f"{self.name_of(wanted)} holds {len(found)} adapters: {more}{named}. Push {word}: "
            f"{self.name_of(found[-1])}"
        )


def join(folder: str, name: str) -> str:
    """The path of a file in a folder; "" is the root."""
    return f"{folder}/{name}" if folder else name


def did_you_mean(missing: NotFound, wanted: str, known: Iterable[str]) -> NotFound:
    """The error with the most similar of the known names, if one is similar."""
    near = get_close_matches(wanted, list(known), n=1)
    return missing.with_hint(f"Did you mean {near[0]!r}?") if near else missing


def _explain(where: str, names: set[str]) -> str:
    if WEIGHTS_FILE in names:
        return f"{where} has no {CONFIG_FILE}: push what save_pretrained wrote."
    return str(missing_weights(where, names))


def _folder(path: PurePosixPath) -> str:
    parent = str(path.parent)
    return "" if parent == "." else parent


def _folders(paths: Iterable[str]) -> set[str]:
    """All folders, those with only folders in them included."""
    return {
        str(parent)
        for path in paths
        for parent in PurePosixPath(path).parents
        if str(parent) != "."
    }


def _age(folder: str) -> tuple[int, str]:
    """The steps of a checkpoint of transformers' Trainer, -1 for another folder; and the name."""
    step = PurePosixPath(folder).name.removeprefix(CHECKPOINT_PREFIX)
    is_checkpoint = (
        folder.endswith(CHECKPOINT_PREFIX + step) and step.isascii() and step.isdecimal()
    )
    return (int(step) if is_checkpoint else -1, folder)
