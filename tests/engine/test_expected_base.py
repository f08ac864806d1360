"""A base that is not loaded is refused for the same reason as one that is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.kv.groups import LayerKvShape
from loraplex.engine.model.expected_base import ExpectedBase, expect_base
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.text.tokenizer import Tokenizer
from support.base_folders import BASE_FOLDERS, BaseFolder, Templates, make_base_folder
from support.families import SERVED, save_family
from support.marks import marked_slow

VALUES = {"not-finite"}
"""Only the weights' values tell."""
READ = [case for case in BASE_FOLDERS if case.name not in VALUES]
WINDOWED = ("gemma3-window", "gpt_oss-sinks-window", "deepseek_v3-mla", "granitemoe")
LAYERS_CHOSEN_BY_VALUES = "jetmoe"


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    return Templates(tmp_path_factory.mktemp("templates"))


@pytest.mark.parametrize("step", marked_slow([12, 1], slow=[1]))
def test_a_folder_is_refused_with_the_code_of_its_load(
    step: int, templates: Templates, tmp_path: Path
) -> None:
    for case in READ[::step]:
        assert code_of(case, templates, tmp_path / case.name) == case.code, case.name


@pytest.mark.parametrize("family", marked_slow(WINDOWED, slow=WINDOWED[1:]))
def test_layers_cache_what_they_cache_when_they_are_loaded(family: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[family])
    loaded = load_base_model(EngineConfig(str(path), device="cpu"))
    shapes: list[LayerKvShape] | None = expect(path).kv_shapes
    assert shapes == loaded.kv_shapes


def test_a_cache_that_only_values_tell_of_is_not_guessed(tmp_path: Path) -> None:
    path = save_family(tmp_path, *SERVED[LAYERS_CHOSEN_BY_VALUES])
    assert expect(path).kv_shapes is None


def code_of(case: BaseFolder, templates: Templates, path: Path) -> str | None:
    try:
        make_base_folder(case, templates, path)
        Tokenizer(expect(path).model_dir)
    except UnsupportedModel as exc:
        return exc.code
    return None


def expect(path: Path) -> ExpectedBase:
    return expect_base(EngineConfig(str(path), device="cpu"), torch.device("cpu"))
