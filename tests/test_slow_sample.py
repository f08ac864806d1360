"""`--slow-sample` leaves slow cases out, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("case", range(40))
def test_quick(case): pass

@pytest.mark.slow
def test_one(): pass

@pytest.mark.slow(is_sampled=False)
def test_what_others_show(): pass

@pytest.mark.slow
@pytest.mark.parametrize("case", range(40))
def test_cases(case): pass

@pytest.mark.slow
@pytest.mark.parametrize("inner", range(2))
@pytest.mark.parametrize("outer", range(40))
def test_products(outer, inner): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tests")
    (path / "test_many.py").write_text(TESTS)
    return path


def collected(folder: Path, *arguments: str) -> list[str]:
    plugins = ("-p", "support.slow_files", "-p", "support.slow_sample", "-p", "no:cacheprovider")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *arguments, "--collect-only", "-q", "."],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.partition("::")[2] for line in ended.stdout.splitlines() if "::" in line]


def test_without_a_sample_all_cases_run(folder: Path) -> None:
    assert len(collected(folder)) == 40 + 2 + 40 + 80


def test_a_sample_is_a_part_of_each_slow_test_and_is_the_same_in_each_run(folder: Path) -> None:
    names = collected(folder, "--slow-sample", "3")
    assert names == collected(folder, "--slow-sample", "3")
    assert len([name for name in names if name.startswith("test_quick")]) == 40
    assert "test_one" in names
    assert "test_what_others_show" not in names
    assert "test_cases[0]" in names
    assert 5 < len([name for name in names if name.startswith("test_cases")]) < 25
    products = [name for name in names if name.startswith("test_products")]
    assert 12 < len(products) < 45
    assert {name[-2] for name in products} == {"0", "1"}
