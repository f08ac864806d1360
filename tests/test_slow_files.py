"""A run of slow tests alone reads the files that name the mark, and no slow test is left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.slow_files import pytest_collection_modifyitems, pytest_ignore_collect


def config(markexpr: str) -> Any:
    return SimpleNamespace(option=SimpleNamespace(markexpr=markexpr))


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    path = tmp_path / "test_quick.py"
    path.write_text("def test_a(): pass\n")
    return path


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    path = tmp_path / "test_marked.py"
    path.write_text("pytestmark = pytest.mark.slow\n")
    return path


def test_only_files_that_name_the_mark_are_read_for_slow_tests(quick: Path, marked: Path) -> None:
    slow_alone = config("slow and not ray")
    assert pytest_ignore_collect(quick, slow_alone)
    assert pytest_ignore_collect(marked, slow_alone) is None
    assert pytest_ignore_collect(quick.parent, slow_alone) is None, "a folder"
    assert pytest_ignore_collect(quick.parent / "conftest.py", slow_alone) is None


@pytest.mark.parametrize("markexpr", ["", "not slow and not ray", "slow or ray", "ray"])
def test_all_files_are_read_for_other_tests(quick: Path, markexpr: str) -> None:
    assert pytest_ignore_collect(quick, config(markexpr)) is None


def test_a_slow_test_in_a_file_that_does_not_name_the_mark_is_an_error(
    quick: Path, marked: Path
) -> None:
    def item(path: Path, *, is_slow: bool) -> Any:
        mark = pytest.mark.slow if is_slow else None
        return SimpleNamespace(path=path, get_closest_marker=lambda name: mark)

    pytest_collection_modifyitems([item(quick, is_slow=False), item(marked, is_slow=True)])
    with pytest.raises(pytest.UsageError, match="test_quick"):
        pytest_collection_modifyitems([item(quick, is_slow=True)])
