"""A pytest plugin: the longest test files begin first.

Otherwise they run on alone when all others have ended, or wait beside others that wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
FIRST = (
    "engine/ranks/test_rank_processes.py",
    "engine/ranks/test_rank_hosts.py",
    "engine/tuning/test_process.py",
    "benchmarks/test_small_benchmarks.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of `FIRST` to the front; else the order is kept."""
    first = {FOLDER / name for name in FIRST}
    items.sort(key=lambda item: item.path not in first)
