"""The committed generated pages match the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.api.cli.reference import cli_reference
from loraplex.api.contract.error_codes import error_reference
from loraplex.api.metrics_reference import metrics_reference
from loraplex.api.settings import Settings
from loraplex.api.settings_reference import settings_reference

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("cli.md", cli_reference),
        ("errors.md", error_reference),
        ("settings.md", settings_reference),
        ("metrics.md", metrics_reference),
    ],
)
def test_a_page_is_current(page: str, printed: Callable[[], str]) -> None:
    assert (DOCS / page).read_text() == printed(), "run `make docs`"


def test_every_setting_is_explained() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_every_command_is_explained() -> None:
    text = cli_reference()
    assert "display_type" not in text
    for heading in ("## loraplex serve", "### loraplex adapters push", "### loraplex keys create"):
        assert f"\n{heading}\n\n" in text
