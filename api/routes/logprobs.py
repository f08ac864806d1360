"""Log-probabilities as JSON can carry them."""

from __future__ import annotations

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, as in OpenAI's answers."""


def reported(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
