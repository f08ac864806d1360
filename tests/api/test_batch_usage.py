"""A batch on a server that is killed again and again has exact results and usage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.batch_kills import run_with_kills
from support.fake_engine import PACE_FILE

pytestmark = pytest.mark.slow


def test_kills_lose_no_line_and_charge_none_twice(tiny_base: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    (base / PACE_FILE).write_text("0.01")  # so that the kills meet lines that run
    assert run_with_kills(base, tmp_path / "data", num_lines=200, num_kills=3) == {
        "lines": 200,
        "kills": 3,
        "errors": 0,
        "missing": 0,
        "repeated": 0,
        "charged_without_answer": 0,
        "answers_without_charge": 0,
        "other_usage": 0,
    }
