from __future__ import annotations

import ast
from pathlib import Path

from loraplex.adapters import rejections
from loraplex.adapters.rejections import REJECTIONS

FOLDER = Path(rejections.__file__).parent


def raised_reasons() -> set[object]:
    """The literal first arguments of every `AdapterRejected(...)` in this layer."""
    return {
        node.args[0].value
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "AdapterRejected"
        and isinstance(node.args[0], ast.Constant)
    }


def test_published_reasons_are_exactly_those_that_are_raised() -> None:
    assert raised_reasons() == REJECTIONS.keys()


def test_every_reason_says_what_it_means_and_what_to_do() -> None:
    for code, rejection in REJECTIONS.items():
        assert code == code.lower()
        assert rejection.meaning.endswith(".")
        assert rejection.way_out
        assert "\n" not in rejection.meaning + rejection.way_out
