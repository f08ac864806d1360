"""Checks intake's verdict on each broken adapter."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import IntakeReport
from loraplex.adapters.intake import IntakeRequest, run_intake
from loraplex.adapters.layout import BaseLayout, layout_to_json
from support.broken_adapters import BROKEN, CONFIG, SERVED, WEIGHTS, BrokenKind
from support.deltas import deltas_of_block, deltas_of_peft
from support.layouts import full_layout_of
from support.models import make_tiny_llama

Examiner = Callable[[IntakeRequest], IntakeReport]


def check_broken(base: Path, kind: BrokenKind, examiner: Examiner = run_intake) -> str:
    """What is wrong with the answer to this kind; empty if it is right."""
    with tempfile.TemporaryDirectory() as directory:
        if kind.is_base_tied:
            base = make_tiny_llama(Path(directory) / "tied", tie_word_embeddings=True)
        layout = _layout_of(base)
        folder = Path(directory) / "adapter"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of some of what is to be shown here
            kind.make(base, folder)
        layout_path, block = Path(directory) / "layout", Path(directory) / "block"
        layout_path.write_text(layout_to_json(layout))
        request = IntakeRequest(
            config_path=str(folder / CONFIG),
            weights_path=str(folder / WEIGHTS),
            output_path=str(block),
            layout_path=str(layout_path),
            serving_dtype=kind.serving_dtype,
        )
        try:
            examiner(request)
        except AdapterRejected as exc:
            is_right = exc.reason == kind.expected and _points(exc, kind.pointer)
            return "" if is_right else f"{exc.reason} at {exc.pointer}: {exc}"
        if kind.expected != SERVED:
            return "accepted"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = deltas_of_peft(base, folder)
        found = deltas_of_block(block, layout)
        is_equal = found.keys() == expected.keys() and all(
            np.allclose(found[module], expected[module], atol=1e-6) for module in expected
        )
        return "" if is_equal else "served with another effect than PEFT's"


def run_broken(base: Path) -> dict[str, str]:
    """Every kind to what is wrong with its answer; empty texts are right."""
    return {name: check_broken(base, kind) for name, kind in BROKEN.items()}


@cache
def _layout_of(base: Path) -> BaseLayout:
    """Almost all kinds have the same base."""
    return full_layout_of(base, with_digests=True)


def _points(error: AdapterRejected, start: str) -> bool:
    return (error.pointer or "").startswith(start)
