"""Quantized bases with states, and every kind of adapter on their layers: a sample of the matrix.

`make quantization-matrix ARGS=--states` serves all of it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.model.base_model import load_base_model
from support.marks import marked_slow
from support.quantized import logit_bound
from support.quantized_bases import QuantizedBase, makers
from support.quantized_states import BASES, FEATURES, make_states_adapters, make_states_base
from support.served_features import mixed_batch
from support.served_ways import Reference

MIN_BOUND = 1e-4
"""Of a logit's error, relative to the largest."""
QUANTIZED = {
    "ct-w8a8": "falcon_h1",
    "gptq": "jamba",
    "nf4-nested": "lfm2",
    "--quantize int4": "qwen3_next",
    "--quantize fp8": "jamba",
}
"""Format and base."""
KV_DTYPES = [("falcon_h1", "deepseek-fp8", KvDtype.INT8), ("qwen3_next", "gptq", KvDtype.AUTO)]


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


@pytest.mark.parametrize("form", marked_slow(QUANTIZED, slow=QUANTIZED.keys() - {"gptq"}))
def test_adapters_over_quantized_layers_with_states_equal_peft_over_their_values(
    form: str, tmp_path: Path
) -> None:
    name = QUANTIZED[form]
    base = make_states_base(name, makers()[form], tmp_path)
    check_against_peft(name, base, tmp_path, features=("dora", "lora_bias"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "kv_dtype"), KV_DTYPES)
def test_a_crowded_quantized_base_answers_as_it_does_alone(
    name: str, form: str, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    base = make_states_base(name, makers()[form], tmp_path)
    reference = Reference(
        base,
        tmp_path / "reference",
        kv_dtype,
        proposers=("none",),
        targets=BASES[name].targets,
        num_prompts=18,
        is_quantized=True,
    )
    (served,), happened = reference.serve()
    reference.close()
    assert served.different == 0
    assert happened.swaps > 0
