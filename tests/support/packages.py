"""The packages of `engine/` and `api/` and their imports, as a list and as a diagram.

`python -m support.packages docs/architecture.md` writes the diagrams between their markers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("engine", "api")

Imports = Mapping[str, set[str]]
"""For each package or flat module of a layer, those of the same layer that it imports."""


@cache
def package_imports(layer: str) -> Imports:
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / layer).rglob("*.py")):
        unit = _unit(path.relative_to(ROOT).with_suffix("").parts)
        imports = found.setdefault(unit, set())
        imports |= {name for name in _imported(path) if name != unit}
    return found


def _unit(parts: tuple[str, ...]) -> str:
    """The package directly within the layer, or the flat module."""
    return parts[1]


def _imported(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parts[:-1]
    layer = package[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1]
        target = (*base, *(node.module.split(".") if node.module else ()))
        if not target or target[0] != layer:
            continue
        if len(target) > 1:
            yield _unit(target)
        else:
            yield from (alias.name for alias in node.names)


def from_bottom_to_top(imports: Imports) -> list[str]:
    """Raises graphlib.CycleError where packages import each other."""
    return list(TopologicalSorter(imports).static_order())


def picture(layer: str) -> str:
    """A Mermaid graph; an import that follows from others is left out."""
    imports = package_imports(layer)
    reached: dict[str, set[str]] = {}
    for unit in from_bottom_to_top(imports):
        reached[unit] = set().union(*(reached[name] | {name} for name in imports[unit]))
    lines = ["```mermaid", "graph TD"]
    for unit in sorted(imports):
        folder = (ROOT / layer / unit).is_dir()
        lines.append(f"  {unit}[{unit}/]" if folder else f"  {unit}({unit}.py)")
        direct = imports[unit] - set().union(*(reached[name] for name in imports[unit]))
        lines += [f"  {unit} --> {name}" for name in sorted(direct)]
    return "\n".join([*lines, "```"])


def with_pictures(text: str) -> str:
    """`text` with the pictures between `<!-- packages: LAYER -->` and `<!-- end -->` made anew."""
    for layer in LAYERS:
        head, begin, rest = text.partition(f"<!-- packages: {layer} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"no place for the picture of {layer}")
        text = head + begin + picture(layer) + "\n" + end + tail
    return text


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_pictures(page.read_text()))
