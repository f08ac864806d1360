"""When two greedy outputs may differ: where rounding decides between nearly equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.execution.sampler import gumbel_noise
from support.engine import LocalEngine

NEAR_TIE = 1e-3
"""Logit gap of another order of summation, fp32."""


def parts_at_near_tie(
    reference: LocalEngine,
    prompt: Sequence[int],
    adapter: AdapterKey | None,
    *,
    expected: Sequence[int],
    actual: Sequence[int],
    gap: float,
    temperature: float = 0.0,
    seed: int = 0,
) -> bool:
    """Whether the answers' first different tokens are less than `gap` apart in logits, or in what
    is drawn by: logits over the temperature, with the noise of this seed.

    `reference` computes the logits behind what the answers have in common. False where one answer
    only ends earlier.
    """
    pairs = enumerate(zip(expected, actual, strict=False))
    index = next((index for index, (left, right) in pairs if left != right), None)
    if index is None or len(expected) != len(actual):
        return False
    probe = reference.submit(
        [*prompt, *expected[:index]],
        adapter,
        max_tokens=1,
        ignore_eos=True,
        return_logits=True,
    )
    reference.run()
    raw = reference.answers[probe].tokens[0].logits
    assert raw is not None
    logits = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    if temperature:
        position = torch.tensor([len(prompt) + index])
        logits = logits / temperature + gumbel_noise(torch.tensor([seed]), position, len(logits))[0]
    return bool(logits[expected[index]] - logits[actual[index]] < gap)


def load_dense(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def assert_greedy(
    dense: Any, prompt: Sequence[int], answer: Sequence[int], mask: Tensor | None = None
) -> None:
    """Every token of the answer is the likeliest by the dense forward over all before it."""
    tokens = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():
        logits = dense(tokens, attention_mask=mask, use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < NEAR_TIE
