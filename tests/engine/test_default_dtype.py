"""Answers do not depend on torch's default dtype.

It is of the whole process: a program that embeds the engine may change it, and transformers does
while it loads a model in another thread. A tensor of another size than a kernel writes would damage
the memory beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.engine.config import Quantization
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.tuned import make_tuned

FORMS = [Quantization.NONE, Quantization.INT4, Quantization.NF4, Quantization.INT8]
ADAPTED: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj"],
}
PROMPT = list(range(3, 20))


@pytest.mark.parametrize("quantization", FORMS, ids=str)
def test_another_default_dtype_changes_no_answer(
    quantization: Quantization, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "base", *SERVED["qwen3_moe"])
    tuned = make_tuned(AutoModelForCausalLM.from_pretrained(model), seed=0, **ADAPTED)
    tuned.save_pretrained(tmp_path / "adapter")
    expected = _answers(model, tmp_path, quantization)
    with _default_dtype(torch.float64):
        assert _answers(model, tmp_path, quantization) == expected


def _answers(model: Path, folder: Path, quantization: Quantization) -> list[list[int]]:
    """Of greedy, drawn and penalized tokens, with and without an adapter of experts."""
    engine = LocalEngine(model, folder, quantization=quantization)
    try:
        adapter = engine.add_adapter(folder / "adapter")
        ids = [
            engine.submit(PROMPT[: 5 + row], temperature=temperature, seed=row)
            for row, temperature in enumerate((0.0, 1.0, 2.0))
        ]
        penalized: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.3, "seed": 7}
        ids += [engine.submit(PROMPT, each, **penalized) for each in (None, adapter)]
        engine.run()
        return engine.tokens(ids)
    finally:
        engine.close()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)
