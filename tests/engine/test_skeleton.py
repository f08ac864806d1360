"""A base's layout from its configuration alone: the same as from the loaded model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loraplex.adapters.layout import layout_from_json
from loraplex.engine.base_model import load_base_model
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.skeleton import read_skeleton
from support.families import REFUSED, SERVED, save_family


@pytest.mark.parametrize("family", SERVED)
def test_a_skeleton_has_the_layout_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    save_family(tmp_path / "base", *SERVED[family])
    loaded = load_base_model(EngineConfig(model=str(tmp_path / "base"), dtype="float32"))
    alone = tmp_path / "config.json"
    shutil.copy(tmp_path / "base" / "config.json", alone)
    skeleton = read_skeleton(alone)
    layout = layout_from_json(skeleton.layout_json)
    assert layout.projections == loaded.layout.projections
    assert layout.refused == loaded.layout.refused
    assert skeleton.dtype == "float32"


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model_type": "no-such-model"}'])
def test_what_is_no_configuration_is_said_to_be_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModel):
        read_skeleton(tmp_path)


def test_a_configuration_that_is_not_served_is_refused_for_its_reason(tmp_path: Path) -> None:
    model_type, differences, reason = REFUSED["llama4-chunked"]
    save_family(tmp_path, model_type, differences)
    with pytest.raises(UnsupportedModel, match=reason):
        read_skeleton(tmp_path)
