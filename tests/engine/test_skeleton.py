"""A base's layout from its configuration equals that of the loaded model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapters.layout import layout_from_json
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.skeleton import read_skeleton
from loraplex.engine.model.whole_base import load_base_model
from support.families import LIKE_OTHERS, SERVED, save_family
from support.marks import marked_slow

RENAMED_HEADS = {"gpt_neox"}
"""Families whose head the checkpoint calls otherwise: nobody can tell a copy of it by its name."""


@pytest.mark.parametrize("family", marked_slow(SERVED, slow=LIKE_OTHERS))
def test_a_skeleton_has_the_layout_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", *SERVED[family])
    loaded = load_base_model(EngineConfig(model=str(base), dtype="float32")).layout
    alone = Path(shutil.copy(base / "config.json", tmp_path))
    for where, has_weights in ((base, True), (alone, False)):
        skeleton = read_skeleton(where)
        layout = layout_from_json(skeleton.layout_json)
        assert skeleton.dtype == "float32"
        if not has_weights:
            assert layout.digests == {}
        elif family not in RENAMED_HEADS:
            assert layout.digests == loaded.digests
        assert replace(layout, base_id=loaded.base_id, digests=loaded.digests) == loaded


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model_type": "no-such-model"}'])
def test_what_is_no_configuration_is_said_to_be_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModel):
        read_skeleton(tmp_path)


def test_a_configuration_that_is_not_served_is_refused_for_its_reason(tmp_path: Path) -> None:
    save_family(tmp_path, "llama", {"layer_types": ["full_attention", "indexed_attention"]})
    with pytest.raises(UnsupportedModel, match="indexed_attention layers"):
        read_skeleton(tmp_path)
