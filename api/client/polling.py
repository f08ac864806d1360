"""Polling intervals of commands."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_SECONDS, LAST_SECONDS = 0.2, 2.0
FRACTION = 0.1


def pauses() -> Iterator[float]:
    """The infinite sequence of polling intervals: a tenth of the time waited so far, within bounds.

    So a long operation is noticed slightly later, and many concurrent pushes poll less often.
    """
    waited = 0.0
    while True:
        pause = min(max(FIRST_SECONDS, FRACTION * waited), LAST_SECONDS)
        yield pause
        waited += pause
