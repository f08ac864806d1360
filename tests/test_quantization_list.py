"""The documented formats and combinations are those of the newest evidence."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from benchmarks.quantization_list import newest, sections, with_section
from benchmarks.quantized_states import KV_BASES, find_faults

from loraplex.engine.config import KvDtype
from support.quantized_bases import makers
from support.quantized_checkpoints import FORMATS
from support.quantized_states import BASES
from support.served_features import features_by_base

PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"


def test_the_page_has_the_newest_evidence() -> None:
    page = PAGE.read_text()
    for section in sections():
        assert with_section(page, section) == page, "run `make docs`"


def test_the_evidence_has_every_format() -> None:
    evidence = newest("evidence")
    assert {row["name"] for row in evidence["formats"]} == FORMATS.keys()
    assert evidence.keys() == {"formats", "mutations", "kv", "mla", "eviction"}


def test_the_matrix_has_every_combination() -> None:
    rows = {row["format"]: row for row in newest("matrix")["formats"]}
    assert rows.keys() == makers().keys()
    features = {name for names in features_by_base().values() for name in names}
    for name, row in rows.items():
        assert row["kv"].keys() == set(KvDtype)
        if not name.startswith("gguf"):
            assert row["features"].keys() == features


def test_the_states_have_every_format_and_base() -> None:
    rows = newest("states")["states"]
    formats = [name for name in makers() if not name.startswith("gguf")]
    assert [(row["base"], row["format"]) for row in rows] == [*product(BASES, formats)]
    assert [*find_faults(rows)] == []
    assert {row["format"]: row["base"] for row in rows if "kv" in row} == KV_BASES


def test_a_page_without_the_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="no section"):
        with_section("# Page\n", "## Measured\n")
