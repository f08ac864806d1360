"""A pytest plugin: which test files took longest, at the end of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

import pytest

NUM_FILES = 10


def seconds_by_file(reports: Iterable[object]) -> dict[str, float]:
    """Setup, call and teardown of all tests of each file."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    return dict(seconds)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest files, unless there was only one."""
    seconds = seconds_by_file(chain.from_iterable(terminalreporter.stats.values()))
    if len(seconds) < 2:
        return
    slowest = sorted(seconds, key=lambda path: -seconds[path])[:NUM_FILES]
    terminalreporter.write_sep("=", f"slowest {len(slowest)} of {len(seconds)} test files")
    for path in slowest:
        terminalreporter.write_line(f"{seconds[path]:7.1f} s  {path}")
