"""A classification head's outputs as probabilities, by the rules of vLLM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...adapters.classification import ProblemType


def activated(
    outputs: npt.NDArray[np.float32], problem_type: ProblemType | None, *, is_wanted: bool
) -> list[float]:
    """Of `outputs [labels]`: for one of several labels their softmax, for any of several or a
    single label the sigmoid of each, for a regression what they are; likewise unless wanted."""
    values = outputs.astype(np.float64)
    if is_wanted and problem_type is not ProblemType.REGRESSION:
        is_of_each = problem_type is ProblemType.MULTI_LABEL or len(values) == 1
        values = _sigmoid(values) if is_of_each else _softmax(values)
    numbers: list[float] = values.tolist()
    return numbers


def _sigmoid(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(0.5 * values))  # it does not overflow


def _softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    powers: npt.NDArray[np.float64] = np.exp(values - values.max())
    powers /= powers.sum()
    return powers
