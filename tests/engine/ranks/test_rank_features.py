"""Every PEFT feature of linear layers and of experts equals PEFT on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.shards.rank_place import GroupShape
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
from support.marks import PEFT_PATTERNS, marked_slow
from support.ranks import followers_as_threads

pytestmark = PEFT_PATTERNS
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
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
EXPERT_FEATURES: dict[str, Feature] = {
    "experts and routers": {"target_modules": [], "target_parameters": [*EXPERTS, "gate.weight"]},
    "patterns": {
        "target_modules": ["o_proj"],
        "target_parameters": EXPERTS,
        "use_rslora": True,
        "rank_pattern": {"gate_up_proj": 5},
        "alpha_pattern": {"down_proj": 16},
    },
    "one layer": {
        "target_modules": [],
        "target_parameters": ["layers.1.mlp.experts.down_proj"],
    },
    "all linear": {"target_modules": "all-linear", "r": 3},
    "head": {"target_modules": ["lm_head"], "target_parameters": EXPERTS},
}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LATENT_FEATURES: dict[str, Feature] = {
    "plain": {"target_modules": LATENT},
    "dora": {"target_modules": LATENT, "use_dora": True, "r": 9},
    "lora bias": {"target_modules": LATENT, "lora_bias": True},
    "expansion": {"target_modules": ["kv_b_proj"], "use_dora": True},
}
BASES: dict[str, tuple[str, dict[str, Any], dict[str, Feature]]] = {
    "llama": (*SERVED["llama"], FEATURES),
    "biased llama": ("llama", {"attention_bias": True, "mlp_bias": True}, BIASES),
    "experts": (*SERVED["qwen3_moe"], EXPERT_FEATURES),
    "latent attention": (
        "deepseek_v2",
        {**SERVED["deepseek_v2-mla"][1], "q_lora_rank": 24},
        LATENT_FEATURES,
    ),
}
"""Name to model type, what differs from the common tiny configuration, and adapters."""
SHAPES = (GroupShape(2, 1), GroupShape(4, 1), GroupShape(1, 2), GroupShape(2, 2))
CASES = [(name, shape) for name in BASES for shape in SHAPES]
QUICK = {
    ("llama", SHAPES[0]),
    ("biased llama", SHAPES[3]),
    ("experts", SHAPES[0]),
    ("latent attention", SHAPES[0]),
}


@pytest.mark.parametrize("case", marked_slow(CASES, slow=set(CASES) - QUICK), ids=str)
def test_features_equal_peft_in_one_mixed_batch(
    case: tuple[str, GroupShape], tmp_path: Path
) -> None:
    name, shape = case
    kind, settings, features = BASES[name]
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
            model,
            tmp_path,
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=shape.ranks_per_stage,
            pipeline_parallel_size=shape.num_stages,
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
