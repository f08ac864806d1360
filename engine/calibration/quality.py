"""How much of a model's predictions quantization changes, on text that no code depends on."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

import torch
from torch import Tensor

from .decoder_walk import DecoderWalk


class Quality(NamedTuple):
    """Means over all positions of the held-out samples."""

    divergence: float
    """KL(original ‖ quantized) of the next token, in nats."""
    perplexity: float
    original_perplexity: float


def compare(
    walk: DecoderWalk,
    originals: Sequence[Tensor],
    quantized: Sequence[Tensor],
    tokens: Sequence[Sequence[int]],
) -> Quality:
    """originals, quantized: the hidden states of the samples `tokens` after the last layer."""
    divergence = original_loss = loss = 0.0
    for original, own, sample in zip(originals, quantized, tokens, strict=True):
        expected = walk.logits(original).float().log_softmax(-1)
        found = walk.logits(own).float().log_softmax(-1)
        following = torch.tensor(sample[1:], device=found.device)[:, None]
        divergence += float((expected.exp() * (expected - found)).sum(-1).mean())
        original_loss -= float(expected[:-1].gather(1, following).mean())
        loss -= float(found[:-1].gather(1, following).mean())
    count = len(tokens)
    return Quality(divergence / count, exp(loss / count), exp(original_loss / count))
