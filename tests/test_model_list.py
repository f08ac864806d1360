"""The list of served model types matches the committed evidence."""

from __future__ import annotations

from pathlib import Path

from benchmarks.base_evidence import find_faults
from benchmarks.model_list import newest_evidence, newest_families, page, readme_row, with_row

ROOT = Path(__file__).parents[1]


def test_the_printed_page_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == page(newest_evidence()), "run `make docs`"


def test_the_readmes_row_is_current() -> None:
    readme = (ROOT / "README.md").read_text()
    row = readme_row(newest_families())
    assert row in readme.splitlines(), "run `make docs`"
    assert with_row(readme.replace(row, "| Base models | others |"), row) == readme


def test_each_type_of_the_evidence_is_exact_or_refused_and_named_once() -> None:
    rows = newest_families()
    assert len({row["type"] for row in rows}) == len(rows)
    for row in rows:
        assert row["result"] in ("exact", "refused")
        if row["result"] == "exact":
            assert row["tokens"] >= 300
            assert row["max_error"] <= 1e-4


def test_each_served_type_of_the_evidence_answered_in_a_crowd_with_an_adapter() -> None:
    served = {row["type"] for row in newest_families() if row["result"] == "exact"}
    crowds = newest_evidence()["crowds"]
    assert {row["type"] for row in crowds} == served
    assert all(row["adapter_error"] <= 1e-4 for row in crowds)
    assert all(row["swapped"]["swaps"] > 0 for row in crowds)


def test_a_type_of_the_committed_evidence_that_is_not_built_any_more_is_a_fault() -> None:
    rows = newest_families()
    assert list(find_faults({"families": rows})) == []
    (fault,) = find_faults({"families": [row for row in rows if row["type"] != "gptj"]})
    assert fault.startswith("gptj: not built")
