"""Prints the tested model types by their exact names, from the newest evidence.

python -m benchmarks.model_list > docs/models.md
python -m benchmarks.model_list --readme README.md    # rewrites the README's row
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_README_ROW = re.compile(r"^\| Base models \|.*\|$", re.MULTILINE)


def newest_families() -> list[dict[str, Any]]:
    """The families of the newest committed `*-base-evidence.json`."""
    newest = max(RESULTS.glob("*-base-evidence.json"))
    rows: list[dict[str, Any]] = json.loads(newest.read_text())["families"]
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """The text of `docs/models.md`."""
    served = [row for row in rows if row["result"] == "exact"]
    lines = [
        "# Base models",
        "",
        "Every model type that transformers builds as a causal language model was tried with a",
        "tiny random configuration, its sliding windows and original contexts within the text.",
        "Served means: the paged, chunked, mixed forward gives the logits of transformers' own",
        "dense forward in fp32, at all positions. Every other type is refused by name at load.",
        "",
        "This page is printed by `python -m benchmarks.model_list` from the evidence of",
        "`make base-evidence`. The same checks run each time that a base is loaded, with its own",
        "configuration and weights ([architecture.md](architecture.md)).",
        "",
        f"## Served: {len(served)} types",
        "",
        "| `model_type` | tokens | largest error, of the largest logit |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{row['type']}` | {row['tokens']} | {row['max_error']:.0e} |" for row in served]
    refused = _names(rows, "refused")
    lines += ["", f"## Refused: {len(refused)} types", "", ", ".join(refused) + "."]
    return "\n".join(lines) + "\n"


def readme_row(rows: list[dict[str, Any]]) -> str:
    """The row of the README's table."""
    names = _names(rows, "exact")
    return (
        f"| Base models | {len(names)} transformers model types, admitted by checks at load time "
        f"([docs/models.md](docs/models.md)): {', '.join(names)} |"
    )


def _names(rows: list[dict[str, Any]], result: str) -> list[str]:
    return [f"`{row['type']}`" for row in rows if row["result"] == result]


def with_row(readme: str, row: str) -> str:
    """The README with this row in place of its own."""
    return _README_ROW.sub(lambda _old: row, readme, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--readme", type=Path, help="write this README's row anew, print nothing")
    readme: Path | None = parser.parse_args().readme
    rows = newest_families()
    if readme is None:
        print(page(rows), end="")
    else:
        readme.write_text(with_row(readme.read_text(), readme_row(rows)))


if __name__ == "__main__":
    main()
