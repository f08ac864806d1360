"""Every "served" row of the published table, from PEFT's files to PEFT's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from loraplex.engine.config import EngineConfig
from loraplex.engine.model.whole_base import load_base_model
from support.features import dense_logits, load_plain
from support.paged import paged_logits
from support.peft_features import draw_trained_values, save_base
from support.served_features import features_by_base, make_adapters, mixed_batch, publish

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", features_by_base())
def test_all_served_features_equal_peft_in_one_mixed_batch(name: str, tmp_path: Path) -> None:
    model = save_base(name, tmp_path / "base")
    adapters = make_adapters(features_by_base()[name], model, tmp_path)
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    for feature, logits in mixed_batch(base, model, adapters, tmp_path):
        assert (logits.served - logits.by_peft).abs().max() < TOLERANCE, feature
        if feature:
            shared = logits.by_peft[:, : logits.without.shape[1]]
            effect = (shared - logits.without).abs().max()
            assert effect > 100 * TOLERANCE, f"{feature} must have an effect"


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_a_copy_of_the_base_that_peft_adds_by_default_changes_nothing(tmp_path: Path) -> None:
    model = save_base("llama", tmp_path / "base")
    targets = ["q_proj", "embed_tokens", "lm_head"]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    trained = get_peft_model(load_plain(model), config)
    draw_trained_values(trained, seed=5)
    trained.save_pretrained(tmp_path / "adapter")
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    builder, [row] = publish(base, [tmp_path / "adapter"], tmp_path)
    tokens = list(range(20))
    ours = paged_logits(base, [tokens], builder=builder, adapters=[row])[0]
    assert (ours - dense_logits(trained.eval(), tokens)).abs().max() < TOLERANCE
