"""`make tune-demo` at a small size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tune_demo import main, missed_bars
from benchmarks.tune_task import golden_lines, training_lines, wrong_lines


def report(
    ratio: float = 1.0,
    steps: int = 1,
    gate: str = "refused",
    *,
    rolled_back: bool = True,
    **shares: float,
) -> dict[str, Any]:
    return {
        "golden": {"candidate": 0.9, "base": 0.09, "worse": 0.89, **shares},
        "gate": {"good": "passed", "worse": gate},
        "canary_rolled_back": rolled_back,
        "neighbours_itl_ratio": ratio,
        "phases": [{"is_training": False, "steps": 0}, {"is_training": True, "steps": steps}],
    }


def parsed(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def test_a_report_at_its_bars_misses_none() -> None:
    assert missed_bars(report(ratio=1.25)) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (report(candidate=0.89, worse=0.0), "candidate"),
        (report(base=0.1), "base"),
        (report(worse=0.9), "worse"),
        (report(ratio=1.26), "neighbours"),
        (report(gate="passed"), "gate"),
        (report(rolled_back=False), "canary"),
        (report(steps=0), "no step"),
    ],
    ids=["candidate", "base", "worse", "neighbours", "gate", "canary", "steps"],
)
def test_a_missed_bar_is_named(found: dict[str, Any], words: str) -> None:
    (missed,) = missed_bars(found)
    assert words in missed


def test_no_question_of_the_golden_set_is_in_the_training_data() -> None:
    trained = {line["messages"][0]["content"] for line in parsed(training_lines(400))}
    asked = [line["messages"][0]["content"] for line in parsed(golden_lines(100))]
    assert len(set(asked)) == 100
    assert not trained.intersection(asked)


def test_the_worse_version_learns_the_same_questions_with_other_answers() -> None:
    right, wrong = parsed(training_lines(100)), parsed(wrong_lines(100))
    assert [line["messages"][0] for line in right] == [line["messages"][0] for line in wrong]
    pairs = [
        (one["messages"][1]["content"], other["messages"][1]["content"])
        for one, other in zip(right, wrong, strict=True)
    ]
    assert sum(text in other for text, other in pairs) < 10
    assert sum(len(other) for _, other in pairs) > 2 * sum(len(text) for text, _ in pairs)


@pytest.mark.slow
def test_a_short_demo_teaches_the_adapter_what_the_base_cannot(tmp_path: Path) -> None:
    main(["--pairs", "1", "--seconds", "3", "--json", str(tmp_path / "report.json")])
    found = json.loads((tmp_path / "report.json").read_text())
    golden = found["golden"]
    assert golden["candidate"] >= 0.9
    assert golden["base"] == golden["worse"] == 0
    assert found["gate"] == {"good": "passed", "worse": "refused"}
    assert found["canary_rolled_back"]
    assert "length" in found["canary_reason"]
    assert found["tokens"] > 0
    assert all(phase["num_gaps"] > 0 for phase in found["phases"])
