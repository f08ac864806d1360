"""Polling intervals of commands."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_SECONDS, LAST_SECONDS = 0.2, 2.0
FRACTION = 0.1


def pauses() -> Iterator[float]:
    """Seconds until the next look, without end: a tenth of what was waited, within bounds.

    What takes long is noticed little later, and many pushes that wait together ask less often.
    """
    waited = 0.0
    while True:
        pause = min(max(FIRST_SECONDS, FRACTION * waited), LAST_SECONDS)
        yield pause
        waited += pause
