"""The published table, row by row, with adapters that PEFT itself wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.formats import (
    REFUSED,
    SERVED,
    RefusedFeature,
    ServedFeature,
    format_reference,
)
from loraplex.adapters.rejections import REJECTIONS
from support.feature_files import FeatureFiles

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
USED_WITH: dict[str, set[str]] = {
    "rslora": {"lora"},
    "rank_pattern": {"lora", "rslora"},
    "alpha_pattern": {"lora"},
    "initialization": {"lora"},
    "output_head": {"lora"},
    "embedding": {"lora"},
    "tied_adapters": {"embedding", "output_head"},
    "router": {"lora"},
    "experts": {"lora"},
    "lora_bias": {"lora"},
    "bias": {"lora"},
    "dora": {"lora", "output_head"},
    "full_matrix": {"lora"},
    "token_rows": {"lora"},
}
"""What else the adapter of each row uses."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FeatureFiles:
    return FeatureFiles(tmp_path_factory.mktemp("features"))


def test_page_is_current() -> None:
    assert PAGE.read_text() == format_reference(), (
        "run: python -m loraplex.adapters.formats > docs/formats.md"
    )


def test_rows_have_names_of_their_own_and_published_codes() -> None:
    rows: list[ServedFeature | RefusedFeature] = [*SERVED, *REFUSED]
    names = [feature.name for feature in rows]
    assert len(set(names)) == len(names)
    assert {feature.code for feature in REFUSED} <= REJECTIONS.keys()
    for feature in rows:
        assert all(feature), feature.name
        assert not any("|" in cell or "\n" in cell for cell in feature), feature.name


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
