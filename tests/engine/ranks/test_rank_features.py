"""Every PEFT feature of a linear family equals PEFT on several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.features import (
    TOKENS,
    Feature,
    change_weights,
    dense_logits,
    draw_bias,
    load_plain,
    tune,
)
from support.marks import marked_slow
from support.ranks import followers_as_threads

TOLERANCE = 1e-4
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FEATURES: dict[str, Feature] = {
    "plain": {"target_modules": LINEAR},
    "rslora and patterns": {
        "target_modules": LINEAR,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 9},
        "alpha_pattern": {"down_proj": 3},
    },
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "both ends": {"target_modules": ["embed_tokens", "lm_head", "down_proj"], "r": 9},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "dora, many ranks": {"target_modules": ["o_proj", "up_proj"], "use_dora": True, "r": 33},
    "dora, both ends": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "lora bias": {"target_modules": [*LINEAR, "lm_head"], "lora_bias": True},
    "whole ends": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": TOKENS},
}
BIASES: dict[str, Feature] = {
    "biases": {"target_modules": LINEAR, "bias": "lora_only"},
    "dora and bias": {"target_modules": LINEAR, "use_dora": True, "bias": "lora_only"},
    "both biases": {"target_modules": ["o_proj"], "lora_bias": True, "bias": "lora_only"},
}
CASES = [("llama", 2), ("llama", 4), ("biased llama", 2), ("biased llama", 4)]


@pytest.mark.parametrize("case", marked_slow(CASES, slow=CASES[1:3]), ids=str)
def test_features_equal_peft_in_one_mixed_batch(case: tuple[str, int], tmp_path: Path) -> None:
    name, size = case
    kind, settings = SERVED["llama"]
    features = FEATURES
    if name != "llama":
        settings, features = {"attention_bias": True, "mlp_bias": True}, BIASES
    model = save_family(tmp_path / "base", kind, settings)
    change_weights(model, draw_bias)
    tuned = {
        feature: tune(model, tmp_path / feature, parameters, seed=index)
        for index, (feature, parameters) in enumerate(features.items())
    }
    generator = torch.Generator().manual_seed(3)
    prompts = {
        feature: [*TOKENS, *torch.randint(VOCAB_SIZE, (19 + index,), generator=generator).tolist()]
        for index, feature in enumerate(["base", *features])
    }
    with followers_as_threads():
        engine = LocalEngine(
            model, tmp_path, dtype="float32", num_threads=1, tensor_parallel_size=size
        )
        keys: dict[str, AdapterKey | None] = {"base": None}
        keys |= {feature: engine.add_adapter(tmp_path / feature) for feature in features}
        ids = {
            feature: engine.submit(prompt, keys[feature], max_tokens=1, return_logits=True)
            for feature, prompt in prompts.items()
        }
        engine.run()
        engine.close()
    references = {"base": load_plain(model), **tuned}
    for feature, request_id in ids.items():
        end = engine.answers[request_id].end
        assert end.error is None, feature
        logits = engine.answers[request_id].tokens[0].logits
        assert logits is not None
        ours = torch.from_numpy(np.frombuffer(logits, dtype=np.float32).copy())
        expected = dense_logits(references[feature], prompts[feature])[-1]
        assert (ours - expected).abs().max() < TOLERANCE, feature
