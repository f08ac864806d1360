"""Every quantized form of a base is trained on the values that it holds, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig
from loraplex.engine.tuning.base import load_tunable_base
from loraplex.engine.tuning.frozen_linear import FrozenLinear
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.families import SERVED, save_family
from support.marks import marked_slow
from support.models import save_byte_tokenizer
from support.quantized_bases import makers

TOKENS = torch.tensor([[5, 9, 100, 31, 77, 12, 120, 8]])
QUICK = ("gptq", "awq", "ct-nvfp4", "nf4-nested", "gguf-q4_k_m")
TOLERANCE = 1e-4
"""Of a logit, fp32, relative to the largest."""


@pytest.mark.parametrize("form", marked_slow(makers(), slow=makers().keys() - QUICK))
def test_a_loss_on_a_quantized_base_is_that_of_the_values_that_it_holds(
    form: str, tmp_path: Path
) -> None:
    dense = save_family(tmp_path / "dense", *SERVED["llama"])
    save_byte_tokenizer(dense)
    made = makers()[form](dense, tmp_path / "served")
    base = load_tunable_base(
        EngineConfig(
            str(made.served), device="cpu", dtype="float32", quantization=made.quantization
        )
    )
    layers = [base.model.get_submodule(path) for path in base.linears]
    quantized = [
        layer
        for layer in layers
        if isinstance(layer, FrozenLinear)
        and isinstance(layer.__dict__["_values"], QuantizedWeight)
    ]
    assert quantized, "the trainer keeps codes"
    plain: Any = AutoModelForCausalLM.from_pretrained(made.plain, dtype=torch.float32)
    expected = plain(input_ids=TOKENS, labels=TOKENS)
    model: Any = base.model
    found = model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    assert (found.loss - expected.loss).abs() <= TOLERANCE * expected.loss
    error = (found.logits - expected.logits).abs().max() / expected.logits.abs().max()
    assert error <= TOLERANCE
