"""Rewrites the section of measured formats in `docs/quantization.md`, from the newest evidence.

python -m benchmarks.quantization_list docs/quantization.md
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_SECTION = re.compile(r"^## Measured\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def newest_evidence() -> dict[str, Any]:
    """The newest committed `*-quantization-evidence.json`."""
    newest = max(RESULTS.glob("*-quantization-evidence.json"))
    evidence: dict[str, Any] = json.loads(newest.read_text())
    return evidence


def section(evidence: dict[str, Any]) -> str:
    """The section's text."""
    tried, crashes = (evidence["mutations"][name] for name in ("tried", "crashes"))
    lines = [
        "## Measured",
        "",
        "`make quantization-evidence` writes a small checkpoint of each format, by its library",
        "where one installs, and compares the served base with transformers and PEFT over the",
        "values that the writer stored: a dense family and one with experts; LoRA, DoRA, adapters",
        "of both ends and whole heads in one batch. Errors are of the largest logit. Bytes are a",
        "large layer's, of those in bf16, with groups of 128 inputs where a format leaves their",
        f"size open. On CUDA all of this is `unmeasured`. Of {tried:,} damaged checkpoints each",
        f"was refused with a code or harmless; {crashes} crashed.",
        "",
        "| format | written by | base | adapters | bytes |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['name']} | {row['writer']} | {row['max_error']:.0e} "
        f"| {row['adapters_max_error']:.0e} | {row['bytes_over_bf16']:.3f} |"
        for row in evidence["formats"]
    ]
    return "\n".join(lines) + "\n\n"


def with_section(page: str, text: str) -> str:
    """The page with this section in place of its own. Raises ValueError if it has none."""
    replaced, count = _SECTION.subn(lambda _match: text, page)
    if count != 1:
        raise ValueError("the page has no section of measured formats")
    return replaced


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    page.write_text(with_section(page.read_text(), section(newest_evidence())))


if __name__ == "__main__":
    main()
