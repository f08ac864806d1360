"""Rewrites the measured sections of `docs/quantization.md`, from the newest evidence and matrix.

python -m benchmarks.quantization_list docs/quantization.md
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def newest(kind: str) -> dict[str, Any]:
    """The newest committed `*-quantization-{kind}.json`."""
    path = max(RESULTS.glob(f"*-quantization-{kind}.json"))
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def measured_section(evidence: dict[str, Any]) -> str:
    """The section of formats, of `make quantization-evidence`."""
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


def combinations_section(matrix: dict[str, Any]) -> str:
    """The section of combinations, of `make quantization-matrix`."""
    rows = matrix["formats"]
    kv_dtypes = list(rows[0]["kv"])
    proposers = ", ".join(f"`{each}`" for each in _proposers(rows) if each != "none")
    lines = [
        "## Combinations",
        "",
        "`make quantization-matrix` serves each format with the rows of [formats.md](formats.md)",
        "that its files can hold, in mixed batches, and with each `--kv-dtype` and proposer.",
        "*Features* are the rows that equal PEFT over the format's values, with the largest error",
        "relative to the largest logit. *bf16* is the largest error in bf16, as a multiple of",
        "PEFT's own, each the median over the tokens. In the other columns, *all* means that plain",
        f"decoding and each proposer ({proposers}) gave",
        "the answers of the dense base alone, in an engine that cuts and reuses prompts and swaps",
        "sequences out. With KV in int4 and int2 they are the answers of the quantized base alone.",
        "CUDA is `unmeasured`.",
        "",
        f"| format | features | bf16 | {' | '.join(f'KV {each}' for each in kv_dtypes)} |",
        "| --- " * (3 + len(kv_dtypes)) + "|",
    ]
    refusals: dict[str, str] = {}
    for row in rows:
        errors = row["features"].values()
        cells = [_kv_cell(row["kv"][each], _proposers(rows), refusals) for each in kv_dtypes]
        lines.append(
            f"| {row['format']} | {len(errors)}, {max(errors):.0e} | {row['bf16']:.2f} "
            f"| {' | '.join(cells)} |"
        )
    lines += ["", *(f"- {mark}: {reason}" for reason, mark in refusals.items())]
    return "\n".join(lines) + "\n\n"


def states_section(matrix: dict[str, Any]) -> str:
    """The section of bases with states, of `make quantization-matrix ARGS=--states`."""
    rows = matrix["states"]
    bases = list(dict.fromkeys(row["base"] for row in rows))
    formats = list(dict.fromkeys(row["format"] for row in rows))
    errors = {(row["format"], row["base"]): max(row["errors"].values()) for row in rows}
    tried = [row for row in rows if "kv" in row]
    lines = [
        "## Models with states",
        "",
        "`make quantization-matrix ARGS=--states` makes small models with linear attention, state",
        "spaces and convolutions of each format, and serves them in mixed batches with adapters of",
        "their layers with states: DoRA, and LoRA with a whole head and trained tokens. A cell is",
        "the largest error of a logit in fp32 against transformers and PEFT over the format's",
        "values, relative to the largest logit. Convolutions and Mamba's `A_log` and `D` are no",
        "matrices of linear layers and stay as they are. Mamba reads the weight of `dt_proj`",
        "instead of calling the layer: `--quantize` leaves it, and from a quantized checkpoint it",
        "is dequantized when the base is loaded. GGUF files of these types are refused. CUDA is",
        "`unmeasured`.",
        "",
        f"| format | {' | '.join(bases)} |",
        "| --- " * (1 + len(bases)) + "|",
        *(
            f"| {form} | {' | '.join(f'{errors[form, base]:.0e}' for base in bases)} |"
            for form in formats
        ),
        "",
        f"One format of each kind ({', '.join(row['format'] for row in tried)}) was also served",
        "with each `--kv-dtype`, with fewer states than its requests needed:",
        "",
        *(f"- {line}" for line in dict.fromkeys(_states_kv(tried))),
        *(f"- {line}" for line in dict.fromkeys(_states_proposers(tried))),
    ]
    return "\n".join(lines) + "\n\n"


def _states_kv(rows: list[dict[str, Any]]) -> Iterator[str]:
    for kv_dtype in rows[0]["kv"]:
        results = [row["kv"][kv_dtype] for row in rows]
        for refusal in (each for each in results if isinstance(each, str)):
            yield f"`{kv_dtype}` is refused: {refusal}"
        served = [each for each in results if not isinstance(each, str)]
        if served:
            different = sum(each["different"] for each in served)
            yield f"`{kv_dtype}`: {different} answers differ from those of the base alone"


def _states_proposers(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        refused = ", ".join(f"`{each}`" for each in row["speculation"])
        for reason in dict.fromkeys(row["speculation"].values()):
            yield f"{refused} are refused: {reason}"
    yield "`ngram`, the default, rests"


def _proposers(rows: list[dict[str, Any]]) -> list[str]:
    return list(rows[0]["kv"]["auto"]["different"])


def _kv_cell(kv: Any, proposers: list[str], refusals: dict[str, str]) -> str:
    """What is served, or a mark of why it is refused."""

    def mark(reason: str) -> str:
        return refusals.setdefault(reason, f"refused ({chr(ord('a') + len(refusals))})")

    if isinstance(kv, str):
        return mark(kv)
    served = [each for each in proposers if kv["different"].get(each) == 0]
    if len(served) == len(proposers):
        return "all"
    refused = [f"{each} {mark(reason)}" for each, reason in kv["refused"].items()]
    if len(served) + len(refused) == len(proposers):
        return "; ".join(["all others", *refused])
    return "; ".join([", ".join(served), *refused])


def with_section(page: str, text: str) -> str:
    """The page with this section in place of its own. Raises ValueError if it has none."""
    heading = text.partition("\n")[0]
    own = re.compile(rf"^{re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    replaced, count = own.subn(lambda _match: text, page)
    if count != 1:
        raise ValueError(f"the page has no section {heading}")
    return replaced


def sections() -> list[str]:
    """The generated sections."""
    return [
        measured_section(newest("evidence")),
        combinations_section(newest("matrix")),
        states_section(newest("states")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    text = page.read_text()
    for section in sections():
        text = with_section(text, section)
    page.write_text(text)


if __name__ == "__main__":
    main()
