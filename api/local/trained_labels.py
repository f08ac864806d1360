"""The labels in the model configuration that a trainer saved beside a classification adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...adapters.classification import FIELDS, TASK


def with_labels(config: Mapping[str, Any], model_config: Path) -> dict[str, Any]:
    """The adapter's configuration with the fields of a classifier that only the model's has, if it
    is one; unchanged if there is no such file, or it cannot be read as one."""
    if config.get("task_type") != TASK:
        return dict(config)
    return {**_fields(model_config), **config}


def _fields(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    known = found if isinstance(found, dict) else {}
    return {name: known[name] for name in FIELDS if known.get(name) is not None}
