"""The draft model as it is loaded."""

from __future__ import annotations

from pathlib import Path

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.speculation.draft_loading import load_draft_model
from support.models import make_tiny_llama


def test_a_draft_model_keeps_its_own_length_whatever_the_base_is_served_with(
    tiny_base: Path, tmp_path: Path
) -> None:
    short = make_tiny_llama(tmp_path / "short", max_position_embeddings=48)
    config = EngineConfig(
        str(tiny_base), device="cpu", max_model_len=64, speculation=(f"draft:{short}",)
    )
    draft = load_draft_model(config, load_base_model(config))
    assert draft is not None
    assert draft.max_model_len == 48


def test_a_draft_model_is_quantized_without_the_exclusions_of_the_base(
    tiny_base: Path, tmp_path: Path
) -> None:
    shallow = make_tiny_llama(tmp_path / "shallow", num_hidden_layers=1)
    config = EngineConfig(
        str(tiny_base),
        device="cpu",
        quantization=Quantization.INT4,
        quantization_group_size=32,
        quantization_exclude=("model.layers.1.*",),
        speculation=(f"draft:{shallow}",),
    )
    base = load_base_model(config)
    draft = load_draft_model(config, base)
    assert draft is not None
    assert base.quantization == "int4, groups of 32, 7 layers excluded"
    assert draft.quantization == "int4, groups of 32"
