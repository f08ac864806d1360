"""The longest test files begin first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.first_files import FIRST, FOLDER, pytest_collection_modifyitems


def item(path: Path, name: str) -> Any:
    return SimpleNamespace(path=path, name=name)


def test_each_of_the_longest_files_exists() -> None:
    assert [name for name in FIRST if not (FOLDER / name).is_file()] == []


def test_the_longest_files_come_first_and_all_else_keeps_its_order() -> None:
    here, longest = Path(__file__), FOLDER / FIRST[0]
    items = [item(here, "b"), item(longest, "2"), item(here, "a"), item(longest, "1")]
    pytest_collection_modifyitems(items)
    assert [each.name for each in items] == ["2", "1", "b", "a"]
