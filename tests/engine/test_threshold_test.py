"""The self-test beyond windows and other thresholds, on a small copy of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model import attention_windows, threshold_test
from loraplex.engine.model.small_copy import find_thresholds, small_copies
from loraplex.engine.model.whole_base import load_base_model
from support.families import save_family

WINDOW = 64
"""Further than the loaded model's own self-test goes."""


def load(path: Path) -> None:
    load_base_model(EngineConfig(str(path), device="cpu"))


def test_a_window_that_the_probe_misses_is_found_by_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, "mistral", {"sliding_window": WINDOW})
    load(path)
    monkeypatch.setattr(attention_windows, "read_window", lambda _mask, _len: None)
    with pytest.raises(UnsupportedModel, match="differs from its own dense forward"):
        load(path)


def test_a_class_that_applies_a_window_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = modeling_llama.eager_attention_forward

    def windowed(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **others: Any) -> Any:
        far = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-module.config.my_window)
        return own(module, q, k, v, mask.masked_fill(far, torch.finfo(q.dtype).min), **others)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", windowed)
    path = save_family(tmp_path, "llama", {"my_window": WINDOW})
    with pytest.raises(UnsupportedModel, match="differs from its own dense forward"):
        load(path)


def test_what_cannot_be_tested_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_family(tmp_path, "mistral", {"sliding_window": WINDOW})
    monkeypatch.setattr(threshold_test, "small_copies", lambda *_args, **_kwargs: iter(()))
    with pytest.raises(UnsupportedModel, match="from position 64 on could not be tested"):
        load(path)


# Sizes and thresholds as published checkpoints have them.
LARGE: list[tuple[str, dict[str, Any]]] = [
    (
        "mistral",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    ),
    ("gpt_oss", {}),
    ("gemma2", {}),
    ("qwen2_moe", {"use_sliding_window": True}),
    ("ministral3", {}),
]


@pytest.mark.parametrize(("model_type", "settings"), LARGE)
def test_a_large_models_copy_is_small_and_has_its_kinds_of_layers(
    model_type: str, settings: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    longest = config.max_position_embeddings
    own = find_thresholds(config, max_model_len=longest)
    assert own
    assert min(own) >= 128

    small = next(small_copies(config, max_model_len=longest))

    assert type(small) is AutoModelForCausalLM._model_mapping[type(config)]
    assert sum(parameter.numel() for parameter in small.parameters()) < 20_000_000
    assert max(find_thresholds(small.config, max_model_len=longest)) < 64
    kinds = (getattr(each, "layer_types", None) or () for each in (config, small.config))
    assert len({frozenset(layers) for layers in kinds}) == 1


def test_thresholds_keep_their_order_in_a_copy() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = AutoConfig.for_model("mistral", sliding_window=4096, rope_parameters=rope)
    small = next(small_copies(config, max_model_len=8192)).config
    original = small.rope_parameters["original_max_position_embeddings"]
    assert original < small.sliding_window
    assert config.sliding_window == 4096, "the loaded model's configuration stays"


def test_a_copy_is_always_the_same_and_leaves_the_global_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_call(*_args: object) -> None:
        raise AssertionError("seeds the generators of all devices")

    monkeypatch.setattr(torch, "manual_seed", no_call)
    config = AutoConfig.for_model("mistral", sliding_window=WINDOW)
    state = torch.get_rng_state()
    first = next(small_copies(config, max_model_len=128)).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)  # elsewhere in the program
    second = next(small_copies(config, max_model_len=128)).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
