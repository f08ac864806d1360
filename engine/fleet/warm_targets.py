"""How many replicas each adapter should be warm on, by its traffic.

The router does not read the targets: the bound spreads a busy adapter by itself. They say what a
joining replica, or the heirs of a draining one, should load before they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

MAX_SHARE = 0.35
"""Theta: one adapter's share of a replica's capacity beyond which it should be on another one."""
HYSTERESIS_SECONDS = 30.0


@dataclass(slots=True)
class _Target:
    num_replicas: int
    needed_at: float


class WarmTargets:
    """Raises a target at once, and lowers it when it was too high for 30 s.

    Example: at 20 requests/s per replica and theta 0.35, 15 requests/s need 3 replicas.
    """

    def __init__(self, capacity: float) -> None:
        """`capacity`: what one replica serves, in the unit of the traffic: requests/s, or running
        requests."""
        self._max_traffic = MAX_SHARE * capacity
        self._targets: dict[str, _Target] = {}

    def update(self, traffic: Mapping[str, float], now: float) -> None:
        """`traffic`: each adapter's, summed over the fleet. `now`: seconds."""
        for adapter in self._targets.keys() | traffic.keys():
            needed = ceil(traffic.get(adapter, 0.0) / self._max_traffic)
            target = self._targets.get(adapter)
            if (
                target is None
                or needed >= target.num_replicas
                or now - target.needed_at >= HYSTERESIS_SECONDS
            ):
                self._targets[adapter] = _Target(needed, now)
        self._targets = {name: each for name, each in self._targets.items() if each.num_replicas}

    def of(self, adapter: str) -> int:
        """0: the adapter has had no traffic."""
        target = self._targets.get(adapter)
        return target.num_replicas if target else 0
