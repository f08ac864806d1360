"""The estimated activations are those of the step that a start measures, counted tensor by
tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.execution.profiling import groups_of, profile_step
from loraplex.engine.model.expected_base import expect_base
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.planning.step_estimate import activation_bytes, graph_bytes
from support.families import SERVED, save_family
from support.live_bytes import live_bytes
from support.marks import marked_slow

WIDER = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4000,
    "max_position_embeddings": 2048,
}
Case = tuple[str, str, Quantization]
CASES: list[Case] = [
    ("llama", "float32", Quantization.NONE),
    ("llama", "bfloat16", Quantization.NONE),
    ("llama", "bfloat16", Quantization.INT8),
    ("llama", "bfloat16", Quantization.INT4),
    ("gemma", "float32", Quantization.INT8),
    ("mixtral", "float32", Quantization.INT8),
    ("qwen3_moe", "bfloat16", Quantization.INT8),
]
BOUND = 0.25
"""Of the counted bytes."""


@pytest.mark.parametrize("case", marked_slow(CASES, slow=CASES[1:]), ids=str)
def test_the_estimate_is_near_what_a_step_has_at_once(case: Case, tmp_path: Path) -> None:
    family, dtype, quantization = case
    model_type, differences = SERVED[family]
    base_dir = save_family(tmp_path, model_type, {**differences, **WIDER})
    config = EngineConfig(str(base_dir), device="cpu", dtype=dtype, quantization=quantization)
    base, expected = load_base_model(config), expect_base(config, torch.device("cpu"))
    for num_tokens in (256, 1024):
        step = replace(config, max_num_batched_tokens=num_tokens)
        counted = live_bytes(lambda: profile_step(step, base, groups_of(step, base)))  # noqa: B023
        assert activation_bytes(step, expected) == pytest.approx(counted, rel=BOUND), num_tokens


def test_graphs_are_captured_on_cuda_only_and_not_if_disabled(tiny_base: Path) -> None:
    def estimate(device: str, **settings: bool) -> int:
        config = EngineConfig(str(tiny_base), device=device, **settings)  # type: ignore[arg-type]
        return graph_bytes(config, expect_base(config, torch.device(device)))

    assert estimate("cuda") > 0
    assert estimate("cpu") == estimate("cuda", enforce_eager=True) == 0
