"""Quantized bases with states, and every kind of adapter on their layers: a sample of the matrix.

`make quantization-matrix ARGS=--states` serves all of it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.model.whole_base import load_base_model
from support.quantized import logit_bound
from support.quantized_bases import QuantizedBase, makers
from support.quantized_states import BASES, FEATURES, make_states_adapters, make_states_base
from support.served_features import mixed_batch

MIN_BOUND = 1e-4
"""Of a logit's error, relative to the largest."""


def check_against_peft(
    name: str, base: QuantizedBase, folder: Path, *, features: Collection[str]
) -> None:
    adapters = make_states_adapters(name, base.plain, folder, features)
    config = EngineConfig(
        str(base.served), device="cpu", dtype="float32", quantization=base.quantization
    )
    served = load_base_model(config)
    bound = max(logit_bound(served), MIN_BOUND)
    for feature, logits in mixed_batch(served, base.plain, adapters, folder):
        largest = logits.by_peft.abs().max()
        assert (logits.served - logits.by_peft).abs().max() < bound * largest, feature
        if feature:
            assert (logits.by_peft - logits.without).abs().max() > 10 * bound * largest, feature


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_all_features_on_layers_with_states_equal_peft(name: str, tmp_path: Path) -> None:
    base = make_states_base(name, lambda dense, _: QuantizedBase(dense, dense), tmp_path)
    check_against_peft(name, base, tmp_path, features=FEATURES)


def test_adapters_over_quantized_layers_with_states_equal_peft_over_their_values(
    tmp_path: Path,
) -> None:
    base = make_states_base("jamba", makers()["gptq"], tmp_path)
    check_against_peft("jamba", base, tmp_path, features=("dora", "lora_bias"))
