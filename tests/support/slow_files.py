"""A pytest plugin: `-m 'slow and ...'` reads only the files that name the mark.

Each worker reads all files itself, half a minute of CPU time; a quarter of the tests are in files
with slow ones.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

MARK = "slow"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file out of a run of slow tests alone if it can have none."""
    wants_slow_alone = config.option.markexpr.startswith(f"{MARK} and ")
    is_test_file = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if wants_slow_alone and is_test_file and not names_mark(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail if a slow test stands in a file that does not name the mark: it would never be run."""
    for item in items:
        if item.get_closest_marker(MARK) and not names_mark(item.path):
            raise pytest.UsageError(f"{item.path} has slow tests and does not name the mark")


@cache
def names_mark(path: Path) -> bool:
    """Whether the file's text has the word."""
    return MARK in path.read_text()
