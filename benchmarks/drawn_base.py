"""Bases for the engine under test: from a checkpoint, or with random weights generated on the
device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.timed_engine import make_model
from transformers import AutoModelForCausalLM

from loraplex.api.bench.models import WEIGHT_STD, BaseShape, llama_config
from loraplex.engine.checkpoint import files as checkpoint
from loraplex.engine.model import load_settings, whole_base

LARGE_SHAPE = BaseShape(
    vocab_size=128_256,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_model_len=8_192,
)
"""8 billion parameters: a checkpoint would take minutes to write, read and hash."""
CALMING = 0.1
"""Of what drawn layers add to the residual stream, which starts at a size of 1: so many of them
would make more of bf16's rounding than a trained model does."""


@contextmanager
def base_of(
    shape: BaseShape, models: Path, *, device: str, is_certain: bool = False
) -> Iterator[Path]:
    """Where engines opened inside find the base; the large one has weights drawn on `device`.

    `is_certain`: see `drawn_weights`.
    """
    if shape is not LARGE_SHAPE:
        yield make_model(models, shape)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        drawn_weights(shape, Path(folder), device=device, is_certain=is_certain),
    ):
        yield Path(folder)


@contextmanager
def drawn_weights(
    shape: BaseShape, path: Path, *, device: str, is_certain: bool = False
) -> Iterator[None]:
    """Bases loaded meanwhile have a configuration at `path`, and weights drawn on the device.

    `is_certain`: each token is followed by the vocabulary's next, whatever half a type's digits
    round away. Otherwise the two likeliest tokens are often as good as equal, and draft tokens that
    should hold would not.
    """
    config = llama_config(shape)
    config.save_pretrained(path)

    def load_weights(
        _path: Path, _config: Any, dtype: torch.dtype, _device: torch.device, **_others: Any
    ) -> Any:
        torch.manual_seed(shape.seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager"
            )
        for name, parameter in model.requires_grad_(False).named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter *= CALMING
            elif name.endswith("embed_tokens.weight"):
                parameter /= WEIGHT_STD
        if is_certain:
            embedded = model.get_input_embeddings().weight
            model.get_output_embeddings().weight.copy_(WEIGHT_STD * embedded.roll(1, 0))
        return model.eval()

    with (
        mock.patch.object(checkpoint, "check_base"),
        mock.patch.object(whole_base, "load_weights", load_weights),
        mock.patch.object(load_settings, "find_packed_format", return_value=None),
        mock.patch.object(whole_base, "compute_base_id", return_value="drawn"),
        mock.patch.object(whole_base, "end_digests", return_value={}),
    ):
        yield
