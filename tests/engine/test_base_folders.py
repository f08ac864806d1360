"""A base with exactly the declared tensors is served; any other is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from benchmarks.base_folders import load_and_compare

from loraplex.engine.checkpoint.files import check_drafts, locate_base
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import BASE_ERRORS, DamagedBase, UnsupportedModel, WeightsMissing
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.text.tokenizer import Tokenizer
from support.base_folders import BASE_FOLDERS, BaseFolder, Templates, make_base_folder
from support.paged import paged_logits

ADVICE_WE_DO_NOT_HAVE = re.compile("trust_remote_code|sentencepiece|tiktoken|pip install", re.I)
BY_NAME = {case.name: case for case in BASE_FOLDERS}
FOUND_WITHOUT_TORCH = {"base_quantized", "base_composite", "base_damaged", "base_foreign"}
"""Codes that files and headers alone lead to,"""
FOUND_IN_WEIGHTS = {
    *("scales-alone", "input-scales-alone", "gemma3-defaults-unwritten", "not-finite"),
}
"""but for these cases, of which the API's process does not know enough."""
COMPARED = {"tied-without-prefix", "deepseek-next-token-layer", "neox-causal-masks", "not-finite"}
"""Computed with as well; `make base-evidence` does so with each that is served."""


def _load(path: Path) -> None:
    """Everything of loading a base that comes before computing with it."""
    folder = locate_base(str(path))
    Tokenizer(folder)
    load_weights(folder, load_config(folder), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    return Templates(tmp_path_factory.mktemp("templates"))


@pytest.mark.parametrize("case", BASE_FOLDERS, ids=lambda case: case.name)
def test_a_folder_is_served_as_it_is_or_refused_in_one_line(
    case: BaseFolder, templates: Templates, tmp_path: Path
) -> None:
    path = tmp_path / "base"
    make_base_folder(case, templates, path)
    load = load_and_compare if case.name in COMPARED else _load
    if case.code is None:
        load(path)
        return
    with pytest.raises(UnsupportedModel) as caught:
        load(path)
    message = str(caught.value)
    assert caught.value.code == case.code, message
    assert "\n" not in message
    assert not ADVICE_WE_DO_NOT_HAVE.search(message)
    if case.code in FOUND_WITHOUT_TORCH and case.name not in FOUND_IN_WEIGHTS:
        with pytest.raises(type(caught.value)):
            locate_base(str(path))


def test_every_refusal_of_a_base_is_met() -> None:
    met = {case.code for case in BASE_FOLDERS} | {"base_not_found", None}
    assert met == {error.code for error in BASE_ERRORS} | {None}


def test_two_loads_of_one_folder_give_equal_logits(templates: Templates, tmp_path: Path) -> None:
    path = tmp_path / "base"
    make_base_folder(BY_NAME["experts"], templates, path)
    first, second = (
        paged_logits(load_base_model(EngineConfig(str(path), device="cpu")), [[5, 6, 7]])[0]
        for _ in range(2)
    )
    assert first.equal(second)


def test_a_draft_model_is_checked_like_a_base(templates: Templates, tmp_path: Path) -> None:
    path = tmp_path / "draft"
    make_base_folder(BY_NAME["half-a-file"], templates, path)
    with pytest.raises(DamagedBase, match=f"^draft model {path}: "):
        check_drafts(["ngram", f"draft:{path}"])


def test_a_draft_model_that_lacks_weights_is_refused(
    tiny_base: Path, templates: Templates, tmp_path: Path
) -> None:
    from loraplex.engine.speculation.draft_loading import load_draft_model

    path = tmp_path / "draft"
    make_base_folder(BY_NAME["layer-missing"], templates, path)
    config = EngineConfig(str(tiny_base), device="cpu", speculation=(f"draft:{path}",))
    with pytest.raises(WeightsMissing, match=f"^draft model {path}: .* model.layers.1"):
        load_draft_model(config, load_base_model(config))
