"""`make tune-evidence` at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.tune_evidence import BARS, main, missed_bars


@pytest.mark.parametrize("name", BARS)
def test_a_difference_is_a_missed_bar(name: str) -> None:
    exact = dict.fromkeys(BARS, 0)
    assert missed_bars(exact) == []
    assert missed_bars({**exact, name: 1}) == [f"{name} is 1"]


def test_killed_jobs_end_as_the_undisturbed_one(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert main(["--kills", "3", "--examples", "40", "--seconds", "3", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["kills"] == {"trainer": 1, "server": 1, "engine": 1}
    assert found["succeeded"] >= 1
