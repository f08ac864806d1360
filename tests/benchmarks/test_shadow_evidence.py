"""`make shadow-evidence` at a small size."""

from __future__ import annotations

import json

import pytest
from benchmarks.shadow_evidence import main, missed_bars


def test_slower_streams_or_a_shadow_that_did_not_run_are_missed_bars() -> None:
    assert missed_bars({"itl_p99_ratio": 1.05, "num_compared": 1}) == []
    assert len(missed_bars({"itl_p99_ratio": 1.06, "num_compared": 1})) == 1
    assert len(missed_bars({"itl_p99_ratio": 1.0, "num_compared": 0})) == 1


def test_a_small_run_compares_copies(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--blocks", "1", "--block-seconds", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["num_compared"] > 0
    assert min(found["num_gaps"].values()) > 0
