"""`make parallel-evidence` finds no error in a small part of what it tries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.parallel_evidence import main, measure_ends, problems

from support.families import SERVED
from support.marks import PEFT_PATTERNS

pytestmark = PEFT_PATTERNS


@pytest.mark.slow
def test_a_sample_is_within_all_bounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = ["families", "formats", "traffic", "canaries"]
    monkeypatch.setattr("sys.argv", ["parallel_evidence", "--sample", "--only", *sections])
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == sections
    assert {row["type"] for row in found["families"]} <= {kind for kind, _ in SERVED.values()}
    assert any(row["result"] == "ok" for row in found["families"])
    assert any(row["result"].startswith("refused") for row in found["families"])
    assert found["canaries"] == {"asked": 200, "foreign": 0}


@pytest.mark.slow
def test_ranks_and_stages_take_little_more_than_their_parts_of_large_ends(tmp_path: Path) -> None:
    rows = measure_ends(tmp_path)
    assert [(row["tp"], row["pp"], row["rank"]) for row in rows] == [
        *((2, 1, 0), (2, 1, 1)),
        *((1, 2, 0), (1, 2, 1)),
    ]
    assert list(problems({"bytes": rows})) == []


@pytest.mark.parametrize(
    "found",
    [
        {"families": [{"result": "wrong"}]},
        {"traffic": {"requests": 3, "different": 2, "near_ties": 1}},
        {"kills": {"tried": 1, "hangs": 1, "uncoded": 0}},
        {"kills": {"tried": 1, "hangs": 0, "uncoded": 1}},
        {"bytes": [{"planned": 100, "actual": 116}]},
        {"canaries": {"asked": 1, "foreign": 1}},
    ],
)
def test_a_figure_beyond_its_bound_is_a_problem(found: dict[str, object]) -> None:
    assert len(list(problems(found))) == 1
