"""The draft model as it is loaded."""

from __future__ import annotations

from pathlib import Path

from loraplex.engine.config import EngineConfig
from loraplex.engine.model.base_model import load_base_model
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
