"""When two greedy outputs may differ: where rounding decides between nearly equal tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.execution.sampler import gumbel_noise
from support.engine import LocalEngine


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
