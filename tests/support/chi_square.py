"""Pearson's chi-square test of samples against a distribution."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_EXPECTED = 5.0
"""Cells that expect fewer draws are counted as one: the test's own rule of thumb."""


def p_value(draws: Tensor, probabilities: Tensor) -> float:
    """How likely draws as odd as these are if they follow `probabilities [num_cells]`.

    `draws`: the cell of each, int64. 0.0 if one fell where nothing can.
    """
    probabilities = probabilities.double()
    observed = torch.bincount(draws, minlength=len(probabilities)).double()
    expected = probabilities / probabilities.sum() * len(draws)
    if observed[expected == 0].any():
        return 0.0
    observed, expected = _pooled(observed, expected)
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def _pooled(observed: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    is_rare = expected < MIN_EXPECTED
    rest = expected[is_rare].sum()
    if rest == 0:
        return observed[~is_rare], expected[~is_rare]
    return (
        torch.cat([observed[~is_rare], observed[is_rare].sum()[None]]),
        torch.cat([expected[~is_rare], rest[None]]),
    )
