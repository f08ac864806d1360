"""Command-line options and output of the benchmarks."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

MODELS = Path(".loraplex/benchmarks")

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Options:
    is_smoke: bool
    """Tiny sizes that show that the benchmark runs; the figures say nothing."""
    models: Path
    """Where the base is made and kept."""


def parse_options(description: str, arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes: whether it runs, not how fast"
    )
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    parsed = parser.parse_args(arguments)
    parsed.models.mkdir(parents=True, exist_ok=True)
    return Options(parsed.smoke, parsed.models)


def print_report(
    benchmark: str, rows: Sequence[Row], *more: tuple[str, Sequence[Row]], **facts: object
) -> None:
    """A table of the rows, more tables by their names, then everything as one line of JSON: the
    last one printed."""
    for line in table(rows):
        print(line)
    for name, others in more:
        print(f"{name.replace('_', ' ')}:")
        for line in table(others):
            print(f"  {line}")
    for name, value in facts.items():
        print(f"{name.replace('_', ' ')}: {_cell(value)}")
    tables = {name: [dict(row) for row in others] for name, others in [("rows", rows), *more]}
    print(json.dumps({"benchmark": benchmark, **machine(), **facts, **tables}))


def machine() -> dict[str, object]:
    """What figures depend on."""
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(rows: Sequence[Row]) -> list[str]:
    """Lines in columns, a header first; all rows have the first one's names."""
    header = list(rows[0])
    cells = [header, *([_cell(row[name]) for name in header] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
