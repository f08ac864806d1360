"""The sampling parameters of requests that do not choose their own."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import InvalidParameter, UnsupportedModel
from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Those that a base's `generation_config.json` may set; others are left to requests."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_generation_defaults(model_dir: Path) -> GenerationDefaults:
    """Those of the base in this folder, as its authors recommend them.

    Raises UnsupportedModel if the file has one that no request may have.
    """
    path = model_dir / "generation_config.json"
    declared = json.loads(path.read_text()) if path.is_file() else {}
    names = [each.name for each in fields(GenerationDefaults)]
    values = {name: declared[name] for name in names if declared.get(name) is not None}
    try:
        SamplingParams(**values)
    except (InvalidParameter, TypeError) as exc:
        raise UnsupportedModel(
            f"generation_config.json: {exc}; --generation-config none ignores its sampling values"
        ) from exc
    return GenerationDefaults(**values)
