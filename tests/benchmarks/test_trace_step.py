"""The trace of a decode step: what it counts, and that it leads through the whole engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.trace_step import MAX_FILES, MAX_FUNCTIONS, Trace, main

from loraplex.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]


def test_a_step_is_traced_from_its_schedule_to_its_events_and_a_message_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sys.getprofile() is None
    by_file: dict[str, list[str]] = report["by_file"]
    assert report["files"] == len(by_file)
    assert report["functions"] == sum(len(set(names)) for names in by_file.values())
    assert report["functions"] <= MAX_FUNCTIONS
    assert report["files"] <= MAX_FILES
    assert report["is_within_bar"]
    assert all((ROOT / path).is_file() for path in by_file)
    path, names = next(iter(by_file.items()))
    assert (path, names[0]) == ("engine/core.py", "EngineCore.step")
    assert report["submission"]["engine/core.py"] == ["EngineCore.handle"]
    passed = "engine/scheduling/", "engine/execution/", "engine/model/", "kernels/", "engine/kv/"
    assert all(any(path.startswith(package) for path in by_file) for package in passed)


def test_a_function_counts_once_and_a_comprehension_does_not() -> None:
    config = EngineConfig("base", speculation=("ngram",))
    with Trace() as trace:
        for _ in range(2):
            assert config.proposers == ["ngram"]
    assert trace.by_file == {"engine/config.py": ["EngineConfig.proposers"]}
