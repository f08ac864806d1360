"""Output of commands: data on stdout, as text or JSON; messages on stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """The columns of the rows under their names, aligned; never cut short."""
    table = [list(columns), *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for cells in table:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def note(message: str) -> None:
    """A message for the person at the terminal."""
    typer.echo(message, err=True)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = ",".join(value) if isinstance(value, list) else str(value)
    # Names are other people's text: nothing in them may steer the terminal.
    return "".join(character if character.isprintable() else "�" for character in text)
