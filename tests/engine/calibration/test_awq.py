"""AWQ's scales: what they are folded into, and how much smaller the error is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loraplex.engine.calibration.awq import Fold, FoldableLayer, best_scale, foldable_norms
from loraplex.engine.calibration.decoder_walk import DecoderWalk, Layer
from loraplex.engine.calibration.grid import GRIDS, round_to_nearest
from loraplex.engine.calibration.layer_inputs import LayerInputs
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.kernels.quantized_weight import CodeType
from support.families import SERVED, save_family
from support.marks import marked_slow

INT4 = GRIDS[CodeType.INT4]
ATTENTION, GATED, DOWN = "qkv of a norm", "gate and up of a norm", "down of up"
FOLDS = {
    "llama": {ATTENTION, GATED, DOWN},
    "gemma": {DOWN},  # its norms multiply by 1 + weight
    "nemotron": set(),  # so do these, and the square of relu is not linear
    "qwen3_moe": {ATTENTION},  # the router reads the other norm too
    "olmo2": {DOWN},  # its norms come after
    "phi3-fused": {ATTENTION, GATED},
}


def first_layer(family: str, path: Path) -> tuple[DecoderWalk, dict[str, nn.Linear]]:
    save_family(path, *SERVED[family])
    model: Any = load_weights(path, load_config(path), torch.float32, torch.device("cpu"))
    walk = DecoderWalk(model)
    prefix = f"{walk.path}.0"
    named = walk.layers[0].named_modules(prefix=prefix)
    return walk, {name: m for name, m in named if type(m) is nn.Linear}


def kind_of(fold: Fold) -> str:
    if fold.readers[0].endswith("down_proj"):
        return DOWN
    return ATTENTION if "attn" in fold.readers[0] else GATED


@pytest.mark.parametrize("family", marked_slow(FOLDS, slow=FOLDS.keys() - {"llama", "gemma"}))
def test_scales_are_folded_where_the_output_stays_as_it_is(family: str, tmp_path: Path) -> None:
    walk, linears = first_layer(family, tmp_path)
    tokens = list(range(20))
    state = walk.first_state(tokens)
    checked: list[int] = []

    def visit(index: int, layer: Layer) -> None:
        if index == 0:
            check_folds(walk, linears, layer, state, FOLDS[family])
            checked.append(index)

    walk.run(tokens, visit)
    assert checked


def check_folds(
    walk: DecoderWalk,
    linears: dict[str, nn.Linear],
    layer: Layer,
    state: Tensor,
    expected_folds: set[str],
) -> None:
    inputs, weights = LayerInputs(), {name: m.weight.data for name, m in linears.items()}
    with inputs.watching(linears):
        expected = layer(state)
    norms = foldable_norms(walk.layers[0], f"{walk.path}.0")
    foldable = FoldableLayer(layer, norms, linears, weights)
    folds = foldable.folds(inputs.siblings(), state)
    assert torch.equal(layer(state), expected), "trying changes nothing"
    assert {kind_of(fold) for fold in folds} == expected_folds
    for fold in folds:
        size = weights[fold.readers[0]].shape[1]
        foldable.apply(fold, torch.linspace(0.3, 3, size), torch.bfloat16)
    torch.testing.assert_close(layer(state), expected, rtol=1e-4, atol=1e-5)


def test_a_norm_is_rounded_as_it_is_stored(tmp_path: Path) -> None:
    walk, linears = first_layer("llama", tmp_path)
    weights = {name: module.weight.data for name, module in linears.items()}
    norms = foldable_norms(walk.layers[0], f"{walk.path}.0")
    foldable = FoldableLayer(lambda state: state, norms, linears, weights)
    fold = Fold("model.layers.0.input_layernorm", ("model.layers.0.self_attn.q_proj",))
    foldable.apply(fold, torch.linspace(0.3, 3, 64), torch.bfloat16)
    norm = foldable.norm(fold)
    assert norm is not None
    assert torch.equal(norm.bfloat16().float(), norm)


def test_inputs_with_large_activations_are_rounded_with_a_smaller_error() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    inputs = torch.randn(300, 64, generator=generator)
    inputs[:, ::16] *= 20
    hessian = inputs.T @ inputs
    scale = best_scale(
        [weight], hessian, inputs.abs().mean(dim=0), INT4, group=32, dtype=torch.float32
    )
    assert scale[::16].min() > scale[1::16].max()

    def error(values: Tensor) -> float:
        return float(((values - weight) @ inputs.T).norm())

    def rounded(values: Tensor) -> Tensor:
        return round_to_nearest(values, INT4, group=32, dtype=torch.float32).dequantize()

    assert error(rounded(weight * scale) / scale) < 0.85 * error(rounded(weight))
