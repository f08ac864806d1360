"""A tiny unquantized model with a tokenizer, and a text to calibrate with."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import Style, training_requests
from loraplex.engine.calibration.layer_quantizer import OnLayer, OnMatrices
from loraplex.engine.calibration.quantization import Outcome, quantize_model
from loraplex.engine.calibration.recipe import Recipe
from loraplex.engine.checkpoint.stored_weights import dense, stored_weights
from loraplex.engine.config import EngineConfig
from loraplex.engine.model.whole_base import load_base_model
from support.families import SERVED, save_family
from support.features import dense_logits
from support.paged import paged_logits
from support.quantized import logit_bound

GROUP = 32
"""Divides all sizes of the small models."""
CPU = torch.device("cpu")
SEQUENCES = ([5, 6, 7, 8, 9, 10, 11], [1, 2, 3])


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
    model: Path,
    out: Path,
    *,
    on_layer: OnLayer = lambda _i, _n, _e: None,
    on_matrices: OnMatrices = lambda _i, _n: None,
    **differences: Any,
) -> Outcome:
    """Quantize into the folder, with the text beside it."""
    text = write_text(out.parent / "text.txt")
    recipe = make_recipe(**differences)
    return quantize_model(
        model, out, text, recipe, device=CPU, on_layer=on_layer, on_matrices=on_matrices
    )


class Interrupted(Exception):
    """Of a run, by a test."""


def interrupt_after_the_first(index: int, _count: int, _error: float | None) -> None:
    """An `on_layer`."""
    if index == 0:
        raise Interrupted


def differing(first: Path, second: Path) -> list[str]:
    """The files of these folders that are not equal."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    return [n for n in names if (first / n).read_bytes() != (second / n).read_bytes()]


def with_values_of(packed: Path, model: Path, folder: Path) -> Path:
    """The unquantized model with the values that the quantized one's codes stand for."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in stored_weights(packed).items():
        tensors[name] = dense(weight.read(), dtype=torch.float32, device=CPU)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_served_as_its_values(packed: Path, model: Path, folder: Path) -> None:
    """`packed` has the logits that transformers computes of the values of its codes, which are
    written to `folder` in place of the unquantized `model`'s."""
    plain = AutoModelForCausalLM.from_pretrained(
        with_values_of(packed, model, folder), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    base = load_base_model(EngineConfig(str(packed), device="cpu"))
    for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True):
        expected = dense_logits(plain, tokens)
        assert (ours - expected).abs().max() < logit_bound(base) * expected.abs().max()
