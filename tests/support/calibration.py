"""A tiny unquantized model with a tokenizer, and a text to calibrate with."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import Style, training_requests
from loraplex.engine.calibration.layer_quantizer import OnLayer
from loraplex.engine.calibration.quantization import Outcome, quantize_model
from loraplex.engine.calibration.recipe import Recipe
from support.families import SERVED, save_family

GROUP = 32
"""Divides all sizes of the small models."""
CPU = torch.device("cpu")


def save_with_tokenizer(path: Path, family: str = "llama") -> Path:
    """A random model, fp32, with the demo's tokenizer."""
    model_type, differences = SERVED[family]
    save_family(path, model_type, {**differences, "vocab_size": 2048})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / "base" / name, path)
    return path


def write_text(path: Path, count: int = 100) -> Path:
    """Requests of the demo's task and their answers."""
    requests = islice(training_requests(3), count)
    path.write_text("\n".join(each.prompt + each.answer(Style.ECHO) for each in requests))
    return path


def make_recipe(**differences: Any) -> Recipe:
    """Small enough for tests."""
    small: dict[str, Any] = {"group_size": GROUP, "num_samples": 8, "sequence_length": 24}
    return Recipe(**{**small, **differences})


def quantize_small(
    model: Path, out: Path, *, on_layer: OnLayer = lambda _i, _n, _e: None, **differences: Any
) -> Outcome:
    """Quantize into the folder, with the text beside it."""
    text = write_text(out.parent / "text.txt")
    recipe = make_recipe(**differences)
    return quantize_model(model, out, text, recipe, device=CPU, on_layer=on_layer)
