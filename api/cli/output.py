"""Output of commands: data on stdout, as text or JSON; messages on stderr."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

import typer

GAP = "  "
MIN_WIDTH = 4
DIGEST_PREFIX = "sha256:"
SHORT_DIGEST = len(DIGEST_PREFIX) + 12

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """The columns of the rows under their names, aligned. In a terminal that is too narrow, digests
    are shortened and cells are folded; elsewhere a row is one line."""
    table = [list(columns), *([_cell(row[column]) for column in columns] for row in rows)]
    if sys.stdout.isatty():
        table = _fitted(table, shutil.get_terminal_size().columns)
    widths = _widths(table)
    for cells in table:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        typer.echo(GAP.join(padded).rstrip())


def _fitted(table: list[list[str]], width: int) -> list[list[str]]:
    """The table within a width, as far as columns of `MIN_WIDTH` allow."""
    room = width - len(GAP) * (len(table[0]) - 1)
    if sum(_widths(table)) <= room:
        return table
    table = [[_shortened(cell) for cell in cells] for cells in table]
    widths = _widths(table)
    while sum(widths) > room and max(widths) > MIN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return [line for cells in table for line in _folded(cells, widths)]


def _folded(cells: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """A row as lines."""
    parts = [
        textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(cells, widths, strict=True)
    ]
    return [list(line) for line in zip_longest(*parts, fillvalue="")]


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*table, strict=True)]


def _shortened(cell: str) -> str:
    """A digest by its first digits, as people compare them; `--json` has the rest."""
    return cell[:SHORT_DIGEST] if cell.startswith(DIGEST_PREFIX) else cell


def note(message: str) -> None:
    """A message for the person at the terminal."""
    typer.echo(message, err=True)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = ",".join(value) if isinstance(value, list) else str(value)
    # Names are other people's text: nothing in them may steer the terminal.
    return "".join(character if character.isprintable() else "�" for character in text)
