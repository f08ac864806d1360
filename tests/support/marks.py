"""Parameters of which some are marked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def marked_slow(values: Iterable[T], *, slow: Collection[T]) -> list[ParameterSet]:
    """The values for `parametrize`; `make test` leaves those of `slow` out."""
    return [
        pytest.param(value, marks=pytest.mark.slow if value in slow else ()) for value in values
    ]


PEFT_PATTERNS = pytest.mark.filterwarnings(
    # PEFT says so of every pattern that names a parameter, and applies it.
    "ignore:The following (rank|alpha)_pattern keys did not match any:RuntimeWarning"
)
"""For tests with adapters of experts."""
