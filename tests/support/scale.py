"""The number of repetitions of a test: a part in `make test`, all in `make soak`."""

from __future__ import annotations

import os

IS_WHOLE = os.environ.get("LORAPLEX_WHOLE") == "1"


def part_of(part: int, whole: int) -> int:
    """`part`, or with LORAPLEX_WHOLE=1 `whole`."""
    return whole if IS_WHOLE else part
