"""Layers that are called one by one, against the model's own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.engine.calibration.decoder_walk import DecoderWalk, Layer
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.errors import UnsupportedModel
from support.families import SERVED, save_family
from support.marks import marked_slow

TOKENS = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [99, 3, 2, 4, 1, 0, 7, 7, 7, 120])
FAMILIES = ["llama", "gemma3-window", "opt", "gpt_neox", "phi", "qwen3_moe", "deepseek_v3-mla"]


def load(path: Path, family: str) -> Any:
    save_family(path, *SERVED[family])
    return load_weights(path, load_config(path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", marked_slow(FAMILIES, slow=FAMILIES[2:]))
def test_all_samples_get_the_logits_of_the_model(family: str, tmp_path: Path) -> None:
    model = load(tmp_path, family)
    walk = DecoderWalk(model)
    walk.check()
    states = [walk.first_state(tokens) for tokens in TOKENS]
    visited = []

    def visit(index: int, layer: Layer) -> None:
        visited.append(index)
        states[:] = [layer(state) for state in states]

    walk.run(TOKENS[0], visit)
    assert visited == list(range(len(walk.layers)))
    for tokens, state in zip(TOKENS, states, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(walk.logits(state), expected)


def test_a_model_that_is_configured_to_return_router_logits_is_walked(tmp_path: Path) -> None:
    model_type, differences = SERVED["qwen3_moe"]
    save_family(tmp_path, model_type, {**differences, "output_router_logits": True})
    model: Any = load_weights(tmp_path, load_config(tmp_path), torch.float32, torch.device("cpu"))
    DecoderWalk(model).check()


def test_layers_that_need_more_than_the_layer_before_gives_are_refused(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    embedded: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Tensor) -> None:
        embedded[:] = [output]

    def add(_module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] + embedded[0], *args[1:])

    model.get_input_embeddings().register_forward_hook(keep)
    model.model.layers[1].register_forward_pre_hook(add)
    with pytest.raises(UnsupportedModel, match="cannot be calibrated one by one"):
        DecoderWalk(model).check()
