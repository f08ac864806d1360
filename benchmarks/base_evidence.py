"""Tests which folders and model types are served as bases; prints one line of JSON.

    make base-evidence [ARGS='--only families folders --sample']

`folders` are valid, damaged, foreign and quantized folders, loaded by the product's own code:
`served` means with transformers' own logits, `refused` with the published `code`. `families` are
the model types that transformers builds: `exact` or `refused`. `crowds` are those that the
committed evidence has as exact, with an adapter and too little room. Exits with 1 if a result
differs from the expected one, and names it on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

from benchmarks.base_crowds import SAME, crowds
from benchmarks.base_families import ANSWERS, families
from benchmarks.base_folders import folders
from benchmarks.model_list import newest_families

from support.family_configs import MODEL_TYPES

SECTIONS = {"families": families, "crowds": crowds, "folders": folders}
"""In this order: the first two fork, so nothing may have started threads before."""

Rows = Sequence[Mapping[str, Any]]


def find_faults(
    evidence: Mapping[str, Rows], model_types: Sequence[str] = MODEL_TYPES
) -> Iterator[str]:
    """One line for each row that is not as it has to be, if these types were tried."""
    for row in evidence.get("folders", []):
        if row["got"] != row["expected"] or (row["got"] == "refused" and not row["code"]):
            yield f"{row['name']}: expected {row['expected']}, got {row['got']} ({row['code']})"
    for row in evidence.get("families", []):
        if row["result"] not in ANSWERS:
            yield f"{row['type']}: {row['result']}"
    for row in evidence.get("crowds", []):
        if row["result"] != SAME:
            yield f"{row['type']} in a crowd: {row['result']}"
    if "families" in evidence:
        built = {row["type"] for row in evidence["families"]}
        for row in newest_families():
            if row["type"] in model_types and row["type"] not in built:
                yield f"{row['type']}: not built, but it is in the committed evidence"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--sample", action="store_true", help="a fourth of the families, for CI")
    options = parser.parse_args(arguments)
    model_types = MODEL_TYPES[::4] if options.sample else MODEL_TYPES
    sections: dict[str, Callable[[], Rows]] = {
        **SECTIONS,
        "families": partial(families, model_types),
    }
    with redirect_stdout(sys.stderr):  # libraries print too
        evidence = {name: run() for name, run in sections.items() if name in options.only}
    print(json.dumps(evidence))
    faults = list(find_faults(evidence, model_types))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
