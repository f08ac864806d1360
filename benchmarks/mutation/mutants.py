"""Mutants of the product as JSON: some drawn at random, or all of the files that are named.

It runs in an environment of its own, with mutmut: its mutators, and four of ours.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
from areas import AREAS, matching
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

ROOT = Path(__file__).parents[2]


def without_call(line: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """Remove a call whose result is unused."""
    match line.body:
        case [cst.Expr(value=cst.Call() | cst.Await())]:
            yield line.with_changes(body=[cst.Pass()])


def without_guard(statement: cst.If) -> Iterator[cst.If]:
    """Take the branch never, or always."""
    for name in ("False", "True"):
        yield statement.with_changes(test=cst.Name(name))


def without_return(line: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """Remove a `return` without a value."""
    match line.body:
        case [cst.Return(value=None)]:
            yield line.with_changes(body=[cst.Pass()])


def without_keyword(call: cst.Call) -> Iterator[cst.Call]:
    """Remove a keyword argument, so that its default applies."""
    for index, argument in enumerate(call.args):
        if argument.keyword is not None:
            yield call.with_changes(args=[*call.args[:index], *call.args[index + 1 :]])


# Strings are messages, most of them, and None in place of a value fails at its first use.
_LEFT_OUT = {
    *("operator_string", "operator_assignment", "operator_arg_removal"),
    "operator_dict_arguments",
}
_MUTATORS: list[tuple[type, Callable[[Any], Any]]] = [
    *((kind, each) for kind, each in mutators.mutation_operators if each.__name__ not in _LEFT_OUT),
    (cst.SimpleStatementLine, without_call),
    (cst.SimpleStatementLine, without_return),
    (cst.Call, without_keyword),
    (cst.If, without_guard),
]


class Change(NamedTuple):
    """One change of one function."""

    function: str
    mutator: str
    line: int
    before: cst.CSTNode
    after: cst.CSTNode


class _Changes(cst.CSTVisitor):
    """Collects all changes of the functions of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Change] = []
        self._names: list[str] = []
        self._num_functions = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.Raise | cst.Assert):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.append(node.name.value)
            self._num_functions += isinstance(node, cst.FunctionDef)
        elif self._num_functions:
            self._collect(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._names.pop()
            self._num_functions -= isinstance(original_node, cst.FunctionDef)

    def _collect(self, node: cst.CSTNode) -> None:
        for kind, mutator in _MUTATORS:
            if isinstance(node, kind):
                for after in mutator(node):
                    line = self.get_metadata(PositionProvider, node).start.line
                    name = ".".join(self._names)
                    self.found.append(Change(name, mutator.__name__, line, node, after))


class _Module(NamedTuple):
    """A file and all changes of its functions."""

    path: Path
    tree: cst.Module
    changes: list[Change]

    @classmethod
    def read(cls, path: Path) -> _Module:
        wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
        changes = _Changes()
        wrapper.visit(changes)
        return cls(path, wrapper.module, changes.found)

    def mutant(self, change: Change) -> dict[str, Any]:
        return {
            "path": str(self.path.relative_to(ROOT)),
            "function": change.function,
            "mutator": change.mutator,
            "line": change.line,
            "before": cst.Module([]).code_for_node(change.before).strip(),
            "after": cst.Module([]).code_for_node(change.after).strip(),
            "source": self.tree.deep_replace(change.before, change.after).code,
        }


def every(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All mutants of these files, named from the root of the repository."""
    for path in paths:
        module = _Module.read(ROOT / path)
        yield from map(module.mutant, module.changes)


def draw(seed: int, per_area: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """`per_area` mutants of each area, each in a different function.

    Functions are drawn with equal chances, of each function a mutator, and of the mutator a change.
    """
    for name in names:
        area = AREAS[name]
        drawn = random.Random(f"{seed}:{name}")
        functions: dict[tuple[Path, str], dict[str, list[Change]]] = {}
        modules = {path: _Module.read(path) for path in matching(ROOT, area.files)}
        for path, module in modules.items():
            for change in module.changes:
                kinds = functions.setdefault((path, change.function), defaultdict(list))
                kinds[change.mutator].append(change)
        for path, function in drawn.sample(sorted(functions), per_area):
            kinds = functions[path, function]
            change = drawn.choice(kinds[drawn.choice(sorted(kinds))])
            yield {"area": name, **modules[path].mutant(change)}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["every", *paths]:
            found = every(paths)
        case ["draw", seed, per_area, *names]:
            found = draw(int(seed), int(per_area), names)
    json.dump(list(found), sys.stdout)
