"""The published feature table, row by row, with adapters that PEFT wrote."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from loraplex.adapters import formats
from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.formats import (
    REFUSED,
    SERVED,
    UNUSUAL,
    RefusedFeature,
    ServedFeature,
    format_reference,
)
from loraplex.adapters.rejections import REJECTIONS
from loraplex.adapters.tensor_names import _UNSERVED_PARTS
from support.deltas import deltas_of_block
from support.feature_files import FeatureFiles
from support.peft_features import draw_trained_values

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
USED_WITH: dict[str, set[str]] = {
    "activated_lora": {"lora", "output_head"},
    "rslora": {"lora"},
    "rank_pattern": {"lora", "rslora"},
    "alpha_pattern": {"lora"},
    "initialization": {"lora"},
    "output_head": {"lora"},
    "embedding": {"lora"},
    "tied_adapters": {"embedding", "output_head"},
    "router": {"lora"},
    "experts": {"lora"},
    "stacked_experts": set(),
    "separate_experts": set(),
    "lora_bias": {"lora"},
    "bias": {"lora"},
    "dora": {"lora", "output_head", "embedding"},
    "full_matrix": {"lora"},
    "token_rows": {"lora"},
    "added_tokens": {"lora", "token_rows"},
    "classification": {"lora"},
    "draft_head": {"lora"},
}
"""What else the adapter of each row uses."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FeatureFiles:
    return FeatureFiles(tmp_path_factory.mktemp("features"))


def test_page_is_current() -> None:
    assert PAGE.read_text() == format_reference(), "run `make docs`"


def test_rows_have_names_of_their_own_and_published_codes() -> None:
    rows: list[ServedFeature | RefusedFeature] = [*SERVED, *REFUSED, *UNUSUAL]
    names = [feature.name for feature in rows]
    assert len(set(names)) == len(names)
    assert {feature.code for feature in [*REFUSED, *UNUSUAL]} <= REJECTIONS.keys()
    for feature in rows:
        assert all(feature), feature.name
        assert not any("|" in cell or "\n" in cell for cell in feature), feature.name


def test_every_code_has_a_row() -> None:
    rows = PAGE.read_text().splitlines()
    for code in REJECTIONS:
        assert any(row.startswith("|") and f"| `{code}` |" in row for row in rows), code


def _literal(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def test_every_refusal_of_a_feature_says_which_row_it_is() -> None:
    """Where the code alone does not, its message has the row's words."""
    shared = {"unsupported_feature", "unsupported_module"}
    named: set[object] = set()
    for path in Path(formats.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            text = ast.unparse(call)
            if call.func.id in ("refusal_message", "_unsupported"):
                named |= {_literal(node) for node in ast.walk(call)}
            elif call.func.id == "AdapterRejected" and _literal(call.args[0]) in shared:
                assert "refusal_message(" in text or ".refused[" in text, text
    by_tensor_name: set[object] = {feature for _, feature in _UNSERVED_PARTS}
    rows: set[object] = {row.name for row in UNUSUAL}
    assert rows - {"module_not_served"} <= named | by_tensor_name


@pytest.mark.parametrize("feature", [feature.name for feature in SERVED])
def test_served_feature_is_accepted_and_reported(
    feature: str, files: FeatureFiles, tmp_path: Path
) -> None:
    report = files.examine(feature, tmp_path / "block")
    assert set(report.features) == {feature} | USED_WITH.get(feature, set())
    assert report.warnings == ()
    assert report.size_bytes == (tmp_path / "block").stat().st_size


@pytest.mark.parametrize("feature", REFUSED, ids=lambda feature: feature.name)
def test_refused_feature_is_refused_with_its_code_and_way_out(
    feature: RefusedFeature, files: FeatureFiles, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRejected) as caught:
        files.examine(feature.name, tmp_path / "block")
    assert caught.value.reason == feature.code
    assert caught.value.pointer
    assert not (tmp_path / "block").exists()
    if feature.code in ("unsupported_feature", "unsupported_module"):
        assert feature.way_out in str(caught.value)


def test_separate_experts_saved_again_by_peft_change_the_base_alike(
    files: FeatureFiles, tmp_path: Path
) -> None:
    """PEFT stacks them when it loads them."""
    old = files.adapter("separate_experts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT looks for its patterns among modules only
        base = AutoModelForCausalLM.from_pretrained(files.base("separate_experts"))
        PeftModel.from_pretrained(base, old).save_pretrained(tmp_path / "saved-again")
    separate = files.examine("separate_experts", tmp_path / "separate")
    stacked = files.examine("experts", tmp_path / "stacked", folder=tmp_path / "saved-again")
    assert "experts" in stacked.features
    layout = files.layout("experts")
    expected = deltas_of_block(tmp_path / "stacked", layout)
    actual = deltas_of_block(tmp_path / "separate", layout)
    assert actual.keys() == expected.keys()
    for name, delta in expected.items():
        np.testing.assert_allclose(actual[name], delta, atol=1e-6)
    assert separate.delta_norm == pytest.approx(stacked.delta_norm, rel=1e-5)


def test_way_out_of_a_changed_base_leads_to_a_served_adapter(
    files: FeatureFiles, tmp_path: Path
) -> None:
    base = files.base("changed_base")
    config = LoraConfig(init_lora_weights="pissa", r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.peft_config["default"].init_lora_weights = True  # as PEFT's guide says
    model.save_pretrained(tmp_path / "initial")
    draw_trained_values(model, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT loads the initial adapter beside the trained one
        model.save_pretrained(
            tmp_path / "converted",
            path_initial_model_for_weight_conversion=str(tmp_path / "initial"),
        )
    report = files.examine("lora", tmp_path / "block", folder=tmp_path / "converted")
    assert (report.features, report.max_rank) == (("lora",), 8)
