"""Every supported PEFT feature equals PEFT, in one mixed batch with base rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.families import SERVED, save_family
from support.marks import marked_slow
from support.models import make_adapter
from support.peft_parity import check_against_peft

LLAMA_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"r": 8},
    "all-linear": {"r": 3, "target_modules": "all-linear"},
    "rslora": {"r": 16, "use_rslora": True},
    "rank-pattern": {"r": 4, "rank_pattern": {"q_proj": 16, "layers.1.mlp.down_proj": 2}},
    "alpha-pattern": {"r": 4, "alpha_pattern": {"v_proj": 32, "layers.1.self_attn.o_proj": 1}},
    "rslora-patterns": {
        "r": 4,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 9},
        "alpha_pattern": {"k_proj": 5},
    },
    "query-and-value-only": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "two-layers-only": {"r": 8, "layers_to_transform": [0, 3]},
    "one-module": {"r": 64, "target_modules": ["model.layers.1.mlp.up_proj"]},
}
FAMILY_TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3-fused": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2-conv1d": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gemma2-softcap-window": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v2-mla": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "bloom-slopes": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt_neo-window": ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"],
    "llama4-chunks": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "mpt-slopes": ["Wqkv", "out_proj", "up_proj", "down_proj"],
    "xglm": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
}
SLOW_FAMILIES = {"falcon", "gpt_neo-window", "llama4-chunks", "mpt-slopes", "xglm"}
"""Families whose layers others have too, or are named in another test."""


def test_every_served_lora_feature_equals_peft_in_one_mixed_batch(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    folders = [
        make_adapter(model, tmp_path / name, seed=index, scale=0.15, **lora)
        for index, (name, lora) in enumerate(LLAMA_FEATURES.items())
    ]
    check_against_peft(model, folders, tmp_path)


@pytest.mark.parametrize("family", marked_slow(FAMILY_TARGETS, slow=SLOW_FAMILIES))
def test_adapters_of_many_families_equal_peft_in_one_mixed_batch(
    family: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "base", *SERVED[family])
    targets = FAMILY_TARGETS[family]
    folders = [
        make_adapter(
            model,
            tmp_path / f"{rank}",
            seed=rank,
            scale=0.1,
            r=rank,
            target_modules=targets[:count],
            fan_in_fan_out=family == "gpt2-conv1d",
        )
        for rank, count in ((2, len(targets)), (5, 2), (8, 1))
    ]
    check_against_peft(model, folders, tmp_path)
