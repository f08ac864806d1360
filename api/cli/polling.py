"""How often a command asks the server again."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_SECONDS, LAST_SECONDS = 0.2, 2.0
FRACTION = 0.1


def pauses() -> Iterator[float]:
    """Seconds until the next look, without end: a tenth of what was waited, within bounds.

    So what takes long is noticed hardly later, and twenty pushes that wait together cost the
    server little: asked five times a second each, they took a third of a core.
    """
    waited = 0.0
    while True:
        pause = min(max(FIRST_SECONDS, FRACTION * waited), LAST_SECONDS)
        yield pause
        waited += pause
