"""How long a fleet takes until adapters are where they shall be."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from support.adapter_homes import AdapterHomes

LOOK_SECONDS = 0.1
MAX_SECONDS = 60.0
"""After this time a fleet does not recover."""


class Recovery(NamedTuple):
    """Seconds until adapters were where they shall be, after a crash or a start."""

    event: str
    pins: float
    targets: float


@dataclass(frozen=True)
class Watch:
    """Looks again and again whether adapters are where they shall be."""

    homes: AdapterHomes
    url: str

    def until_right(self, event: str, *, lost: Collection[str] = ()) -> Recovery:
        """To be called right after it. `lost`: addresses of replicas that stay away."""
        begun_at = time.monotonic()
        pins = targets = None
        while pins is None or targets is None:
            right = self.homes.look(self.url, lost=lost)
            seconds = time.monotonic() - begun_at
            assert seconds < MAX_SECONDS, f"{event}: {right} after {seconds:.0f} s"
            pins = (pins or seconds) if right.pins else None
            targets = (targets or seconds) if right.targets else None
            time.sleep(LOOK_SECONDS)
        return Recovery(event, round(pins, 1), round(targets, 1))
