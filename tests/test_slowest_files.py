"""The end of a test run names its slowest files, with one worker and with several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = "def test_nothing(): pass\n"
SLOW = """
import time, pytest
@pytest.fixture
def slow():
    time.sleep(0.2)
    yield
    time.sleep(0.2)
def test_slow(slow): time.sleep(0.2)
"""


def run_pytest(folder: Path, *arguments: str) -> str:
    """What it prints over the test files of a folder, with the plugin."""
    plugins = ("-p", "xdist.plugin", "-p", "support.slowest_files", "-p", "no:cacheprovider")
    tests = str(Path(__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *arguments, "--rootdir", str(folder), "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": tests, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "workers", [[], pytest.param(["-n", "2", "--dist", "loadfile"], marks=pytest.mark.slow)]
)
def test_the_ten_slowest_files_come_first_to_last(tmp_path: Path, workers: list[str]) -> None:
    for number in range(10):
        (tmp_path / f"test_{number}.py").write_text(QUICK)
    (tmp_path / "test_slow.py").write_text(SLOW)
    printed = run_pytest(tmp_path, *workers)
    _, found, table = printed.partition("slowest 10 of 11 test files")
    assert found, printed
    rows = re.findall(r"^ *([\d.]+) s  (\S+)$", table, re.MULTILINE)
    assert len(rows) == 10
    seconds, path = rows[0]
    assert path == "test_slow.py"
    assert float(seconds) >= 0.6, "setup, call and teardown"


def test_one_file_is_not_ranked(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(QUICK)
    assert "slowest" not in run_pytest(tmp_path)
