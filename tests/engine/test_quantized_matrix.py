"""Quantized bases with every PEFT feature, KV format and proposer: a sample of the matrix.

`make quantization-matrix` serves all of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.model.whole_base import load_base_model
from support.marks import marked_slow
from support.models import make_tiny_llama
from support.peft_features import save_base
from support.quantized import logit_bound
from support.quantized_bases import makers
from support.served_features import features_by_base, make_adapters, mixed_batch
from support.served_ways import Reference

MIN_BOUND = 1e-4
"""Of a logit's error, relative to the largest."""
FEATURES = {
    "gptq-ordered": "llama",
    "nf4-nested": "llama_tied",
    "ct-int4-asymmetric": "mixtral",
    "--quantize mxfp4": "llama_bias",
    "gguf-q4_k_m": "llama",
}
KV_DTYPES = {
    "gptq-ordered": KvDtype.INT4,
    "nf4-nested": KvDtype.INT8,
    "deepseek-fp8": KvDtype.AUTO,
    "gguf-q8_0": KvDtype.INT2,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files of GGUF become folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", marked_slow(FEATURES, slow=FEATURES.keys() - {"nf4-nested"}))
def test_all_served_features_equal_peft_over_the_values_of_the_format(
    name: str, tmp_path: Path
) -> None:
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    dense = save_base(FEATURES[name], tmp_path / "dense")
    base = makers()[name](dense, tmp_path / "served")
    adapters = make_adapters(features_by_base()[FEATURES[name]], base.plain, tmp_path)
    config = EngineConfig(
        str(base.served), device="cpu", dtype="float32", quantization=base.quantization
    )
    served = load_base_model(config)
    bound = max(logit_bound(served), MIN_BOUND)
    for feature, logits in mixed_batch(served, base.plain, adapters, tmp_path):
        error = (logits.served - logits.by_peft).abs().max()
        assert error < bound * logits.by_peft.abs().max(), feature


@pytest.mark.slow
@pytest.mark.parametrize("name", KV_DTYPES)
def test_every_proposer_answers_as_the_base_does_alone(name: str, tmp_path: Path) -> None:
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    base = makers()[name](make_tiny_llama(tmp_path / "dense", seed=1), tmp_path / "served")
    reference = Reference(base, tmp_path / "reference", KV_DTYPES[name])
    served, happened = reference.serve()
    reference.close()
    assert {each.proposer: each.different for each in served if each.different} == {}
    assert sum(each.near_ties for each in served) <= 2
    assert min(happened) > 0, f"not everything happened: {happened}"
    assert sum(each.accepted for each in served) > 0
