"""The manifest of the demo's weights: recipe, accuracies, and every file's SHA-256."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .recipe import Recipe

WEIGHTS = Path(__file__).parent / "weights"
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The number of held-out requests with exactly correct greedy answers."""

    num_requests: int
    num_exact: int
    num_exact_int8: int
    """The same with a base whose linear layers are quantized to int8."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `manifest.json`."""

    recipe: Mapping[str, object]
    python: str
    accuracies: Mapping[str, Accuracy]
    sha256: Mapping[str, str]
    """By file path relative to the weights' folder, with forward slashes."""


def write_manifest(root: Path, recipe: Recipe, accuracies: Mapping[str, Accuracy]) -> None:
    """List the files under `root`."""
    manifest = Manifest(recipe_as_json(recipe), platform.python_version(), accuracies, hashes(root))
    text = json.dumps(asdict(manifest), indent=2, sort_keys=True)
    (root / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def read_manifest(root: Path = WEIGHTS) -> Manifest:
    fields = json.loads((root / MANIFEST_NAME).read_text(encoding="utf-8"))
    accuracies = {name: Accuracy(**counts) for name, counts in fields.pop("accuracies").items()}
    return Manifest(accuracies=accuracies, **fields)


def hashes(root: Path) -> dict[str, str]:
    """SHA-256 of every file below `root` but the manifest, by relative path."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path.name != MANIFEST_NAME
    }


def recipe_as_json(recipe: Recipe) -> dict[str, object]:
    """The recipe as it reads back from JSON: tuples become lists."""
    fields: dict[str, object] = json.loads(json.dumps(asdict(recipe)))
    return fields
