"""A base of which all layers are copies of one, so that a large one is quantized in moments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from support.families import save_family
from support.quantized_checkpoints import WEIGHTS, formats, write_checkpoint

_GROUP = 128
_FIRST = ".layers.0."


def save_repeated(
    folder: Path, settings: dict[str, Any], num_layers: int, *, form: str | None = None
) -> Path:
    """Save a llama with these settings, and so many copies of its layer, in this format of
    `FORMATS` with groups of 128; None: in bf16."""
    one = save_family(folder / "one", "llama", {**settings, "num_hidden_layers": 1})
    if form is not None:
        one = write_checkpoint(one, folder / "quantized", formats(_GROUP)[form])
    repeated = {}
    for name, tensor in load_file(one / WEIGHTS).items():
        values = tensor.bfloat16() if form is None else tensor
        for layer in range(num_layers if _FIRST in name else 1):
            repeated[name.replace(_FIRST, f".layers.{layer}.")] = values.clone()
    config = json.loads((one / "config.json").read_text())
    base = folder / "base"
    base.mkdir()
    save_file(repeated, base / WEIGHTS, metadata={"format": "pt"})
    changes = {"num_hidden_layers": num_layers, "layer_types": None}
    (base / "config.json").write_text(json.dumps({**config, **changes}))
    for path in one.iterdir():
        if path.name not in (WEIGHTS, "config.json"):
            shutil.copy(path, base)
    return base
