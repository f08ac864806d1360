"""The documented formats are those of the newest evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.quantization_list import newest_evidence, section, with_section

from support.quantized_checkpoints import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"


def test_the_page_has_the_newest_evidence() -> None:
    page = PAGE.read_text()
    assert with_section(page, section(newest_evidence())) == page, "run `make docs`"


def test_the_evidence_has_every_format() -> None:
    evidence = newest_evidence()
    assert {row["name"] for row in evidence["formats"]} == FORMATS.keys()
    assert evidence.keys() == {"formats", "mutations", "kv", "mla", "eviction"}


def test_a_page_without_the_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="no section"):
        with_section("# Page\n", "## Measured\n")
