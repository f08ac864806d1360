"""Adapters over quantized layers, which ranks hold in part, have the logits of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.engine.config import Quantization
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.features import Feature, tune
from support.quantized_checkpoints import FORMATS, write_checkpoint
from support.ranks import followers_as_threads

pytestmark = pytest.mark.slow

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FEATURES: dict[str, Feature] = {
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "lora bias": {"target_modules": LINEAR, "lora_bias": True},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "down_proj"], "r": 9},
}
PROMPT = [3, 17, 5, 90, 4, 22, 8, 31, 9, 77, 6, 12]
CASES: dict[str, dict[str, Any]] = {
    "--quantize nf4": {
        "quantization": Quantization.NF4,
        "embedding_quantization": Quantization.FP8,
    },
    "--quantize int8": {"quantization": Quantization.INT8, "quantization_group_size": 32},
    "gptq-ordered": {},
}
TOLERANCE = {"--quantize nf4": 1e-5}
ROUNDED_TOLERANCE = 1e-3
"""Relative to the largest logit, as in `support.quantized.logit_bound`: inputs have 16 bits."""


@pytest.mark.parametrize("name", CASES)
def test_adapters_over_a_quantized_base_have_the_logits_of_one_rank(
    name: str, tmp_path: Path
) -> None:
    """Magnitudes need the lengths of whole rows, of which a rank has its inputs."""
    model = save_family(tmp_path / "base", *SERVED["llama"])
    for index, (feature, parameters) in enumerate(FEATURES.items()):
        tune(model, tmp_path / feature, parameters, seed=index)
    if name in FORMATS:
        model = write_checkpoint(model, tmp_path / "quantized", FORMATS[name])

    def logits(num_ranks: int) -> list[Tensor]:
        engine = LocalEngine(
            model,
            tmp_path,
            dtype="float32",
            num_threads=1,
            tensor_parallel_size=num_ranks,
            **CASES[name],
        )
        keys = [None, *(engine.add_adapter(tmp_path / feature) for feature in FEATURES)]
        ids = [engine.submit(PROMPT, key, max_tokens=1, return_logits=True) for key in keys]
        engine.run()
        engine.close()
        return [last_logits(engine, request_id) for request_id in ids]

    expected = logits(1)
    with followers_as_threads():
        found = logits(2)
    for ours, other in zip(found, expected, strict=True):
        tolerance = TOLERANCE.get(name, ROUNDED_TOLERANCE)
        assert (ours - other).abs().max() < tolerance * other.abs().max()


def last_logits(engine: LocalEngine, request_id: str) -> Tensor:
    answer = engine.answers[request_id]
    assert answer.end.error is None
    logits = answer.tokens[0].logits
    assert logits is not None
    return torch.from_numpy(np.frombuffer(logits, dtype=np.float32).copy())
