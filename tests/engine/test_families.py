"""Which transformers families are served, and that their outputs are correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.fused_layers import FusedLayers, fuse_layers
from loraplex.engine.model.whole_base import load_base_model
from support.cpu_kernels import remove_cpu_library
from support.families import LIKE_OTHERS, REFUSED, SERVED, VOCAB_SIZE, save_family
from support.fused import own_rotary_afterwards
from support.marks import marked_slow
from support.paged import paged_logits

TOLERANCE = 1e-4
ADJACENT = ("cohere", "cohere2-window", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
"""Families that rotate adjacent elements of a head."""
PARTIAL = ("glm4_moe", "gpt_neox", "nemotron")
"""Families that rotate a part of each head."""
OWN_CODE = {
    **{case: {"rotary"} for case in (*ADJACENT, *PARTIAL)},
    # It clamps the gate, and its cosines have half a head's size.
    "gpt_oss-sinks-window": {"activations", "rotary"},
}
"""The kinds of layers that are not fused; see `fused_layers`."""


@pytest.mark.parametrize("case", marked_slow(SERVED, slow=LIKE_OTHERS))
def test_mixed_chunked_paged_logits_equal_the_models_own_dense_forward(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, *SERVED[case])
    dense = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with monkeypatch.context() as patch:
        remove_cpu_library(patch)
        base = load_base_model(EngineConfig(str(path), device="cpu"))
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (41, 1, 17, 26)
    ]

    dense_logits = [dense_forward(dense, tokens) for tokens in sequences]

    with monkeypatch.context() as patch:
        remove_cpu_library(patch)
        logits = paged_logits(base, sequences)
        assert_alike(logits, dense_logits)
        assert all(theirs.std() > 0.01 for theirs in dense_logits), "it says something"
        with own_rotary_afterwards():
            assert_all_are_fused(case, fuse_layers(base.model))
            # Kernels replace what plain ops replace here, to the bit.
            assert all(map(torch.equal, paged_logits(base, sequences), logits))
            patch.undo()
            assert_alike(paged_logits(base, sequences), dense_logits)


def dense_forward(dense: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = dense(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_alike(logits: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(logits, expected, strict=True):
        assert (ours - theirs).abs().max() < TOLERANCE


def assert_all_are_fused(case: str, fused: FusedLayers) -> None:
    for kind in ("norms", "activations", "rotary"):
        num_fused, num_layers = getattr(fused, kind)
        assert num_fused == (0 if kind in OWN_CODE.get(case, ()) else num_layers)


@pytest.mark.parametrize("case", REFUSED)
def test_a_family_that_would_be_served_wrong_is_refused_with_the_reason(
    case: str, tmp_path: Path
) -> None:
    model_type, differences, reason = REFUSED[case]
    path = save_family(tmp_path, model_type, differences)
    with pytest.raises(UnsupportedModel, match=reason):
        load_base_model(EngineConfig(str(path), device="cpu"))
