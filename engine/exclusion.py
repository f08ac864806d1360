"""Which layers of a model the operator excludes from quantization."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from .errors import InvalidParameter


def excluded_layers(paths: Sequence[str], globs: Sequence[str], *, param: str) -> frozenset[str]:
    """Those of these layers, by their paths in the model, that match any of the globs.

    Raises InvalidParameter for `param` if a glob matches none of them, as a mistyped one would, or
    if no layer is left.
    """
    excluded: set[str] = set()
    for glob in globs:
        matching = [path for path in paths if fnmatchcase(path, glob)]
        if not matching:
            such = f", such as {paths[0]}" if paths else ""
            raise InvalidParameter(param, f"{glob} matches no linear layer or expert{such}")
        excluded.update(matching)
    if globs and len(excluded) == len(paths):
        raise InvalidParameter(param, "excludes every linear layer and expert")
    return frozenset(excluded)
