"""`make batch-evidence` at a small size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.batch_evidence import EXACT, main, missed_bars


def report(ratio: float = 1.0, num_answered: int = 1, **kills: int) -> dict[str, Any]:
    return {
        "kills": {**dict.fromkeys(EXACT, 0), **kills},
        "latency": {"itl_p99_ratio": ratio, "lines_answered_meanwhile": num_answered},
    }


@pytest.mark.parametrize("name", EXACT)
def test_a_difference_is_a_missed_bar(name: str) -> None:
    assert missed_bars(report()) == []
    assert missed_bars(report(**{name: 1})) == [f"kills.{name} is 1"]


def test_a_slower_stream_or_a_batch_that_did_not_run_is_a_missed_bar() -> None:
    assert missed_bars(report(ratio=1.1)) == []
    assert len(missed_bars(report(ratio=1.11))) == 1
    assert len(missed_bars(report(num_answered=0))) == 1


def test_a_small_run_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--lines", "60", "--kills", "1", "--blocks", "1", "--block-seconds", "2"])
    found = json.loads(capsys.readouterr().out)
    assert {found["kills"][name] for name in EXACT} == {0}
    assert found["latency"]["num_gaps"]["with"] > 0
