"""The sampling parameters that a base's generation_config.json sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from support.engine import LocalEngine
from support.models import make_tiny_llama


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    saved = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05
    )
    saved.save_pretrained(tmp_path)
    assert read_generation_defaults(tmp_path) == GenerationDefaults(0.6, 0.95, 20, 0.01, 1.05)


@pytest.mark.parametrize("declared", [None, {}, {"eos_token_id": 2, "temperature": None}])
def test_what_is_not_declared_changes_nothing(
    tmp_path: Path, declared: dict[str, object] | None
) -> None:
    if declared is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(declared))
    assert read_generation_defaults(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize("declared", [{"temperature": -1.0}, {"top_p": "high"}])
def test_a_value_that_no_request_may_have_is_refused_by_name(
    tmp_path: Path, declared: dict[str, object]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(declared))
    with pytest.raises(
        UnsupportedModel, match=r"generation_config\.json.*--generation-config none"
    ):
        read_generation_defaults(tmp_path)


def test_an_engine_reports_them_unless_they_are_switched_off(tmp_path: Path) -> None:
    base = make_tiny_llama(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    for option, expected in (("auto", 0.5), ("none", 1.0)):
        engine = LocalEngine(base, tmp_path, generation_config=option)
        assert engine.core.info.generation_defaults.temperature == expected
        engine.close()
