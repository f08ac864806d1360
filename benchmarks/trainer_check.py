"""Confined trainers on a device: their losses against a trainer's on the CPU, and their limit.

Needs accelerate beside the packages of `make gpu-check`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loraplex.engine.tuning.messages import Failed, Open, Trained
from support.models import make_tiny_llama
from support.tuning import chat_line, of_kind, open_order, recipe, train, write_lines

QUANTIZATIONS = ("none", "int8", "int4")
TOLERANCE = 1e-3
"""Of a loss, fp32."""
SMALL_BYTES = 1 << 20
"""Less than the base."""


def check_trainer(folder: Path, device: str) -> dict[str, Any]:
    """Losses of each step for each quantization, and whether a trainer above its limit says so."""
    if find_spec("accelerate") is None:
        return {"ok": False, "error": "accelerate is not installed"}
    base = make_tiny_llama(folder / "base", num_hidden_layers=4)
    lines = [chat_line(f"Question {number}", "42!") for number in range(24)]
    data = write_lines(folder / "lines", lines)

    def order(name: str, quantization: str, where: str, **changes: Any) -> Open:
        return open_order(
            base,
            data,
            folder / name,
            quantization=quantization,
            device=where,
            recipe=recipe(num_epochs=2),
            **changes,
        )

    differences = {
        name: _difference(
            train(order(f"{name}-expected", name, "cpu")), train(order(name, name, device))
        )
        for name in QUANTIZATIONS
    }
    limit = {"max_memory_bytes" if device == "cpu" else "max_device_bytes": SMALL_BYTES}
    ends = of_kind(train(order("limited", "none", device, **limit)), Failed)
    codes = [failed.code for failed in ends]
    return {
        "ok": max(differences.values()) <= TOLERANCE and codes == ["out_of_memory"],
        "differences": differences,
        "above_the_limit": codes,
    }


def _difference(expected: list[Any], found: list[Any]) -> float:
    """The largest of all steps; infinite if one did not train."""
    one, other = (_losses(reports) for reports in (expected, found))
    if not one or len(one) != len(other):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _losses(reports: list[Any]) -> list[float]:
    return [each.loss for each in of_kind(reports, Trained)]
