"""The mutation survey tells which changes of a function its tests notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = """
class Sums:
    def add(self, one, other):
        if one is None:
            return other
        return one + other

def uncalled(number):
    return number

def closed(number):
    def inner():
        return number
    return inner
"""
TESTS = """
import pytest
from sums import Sums, closed

def test_adds():
    assert Sums().add(2, 3) == 5

def test_that_fails_without_a_change():
    assert Sums().add(2, 3) == 6

def test_a_closure():
    assert closed(7)() == 7
"""
SURVEY = """
import sys, pytest
from benchmarks.mutation.forked_tests import ForkedTests, Mutant
product = open("sums.py").read()
changes = [
    ("one + other", "one - other"),
    ("if one is None:\\n            return other\\n", "pass\\n"),
    ("return number\\n", "return None\\n"),
    ("        return number\\n", "        return -number\\n"),
]
path = sys.argv[1]
mutants = [Mutant(path, 1, "", *each, product.replace(*each, 1)) for each in changes]
note = lambda mutant, outcome: print(outcome, file=sys.__stdout__)
tests = ForkedTests(mutants, note, max_seconds=1.0)
pytest.main(["-q", "--capture=sys", "-p", "no:cacheprovider", "test_sums.py"], plugins=[tests])
"""


def test_a_change_is_caught_or_survives_or_no_test_calls_it(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(PRODUCT)
    (tmp_path / "test_sums.py").write_text(TESTS)
    ended = subprocess.run(
        [sys.executable, "-c", SURVEY, str(tmp_path / "sums.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = ["caught", "survived", "not called", "caught"]
    assert ended.stdout.splitlines()[:4] == expected, ended.stdout + ended.stderr
    assert "test_that_fails_without_a_change" in ended.stderr
