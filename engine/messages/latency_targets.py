"""The service level objective of a server, a tenant or a request."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The targets for TTFT and ITL in seconds; None: there is no such target."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, itl_ms: float | None) -> LatencyTargets:
        """From milliseconds."""
        ttft, itl = (None if ms is None else ms / 1000 for ms in (ttft_ms, itl_ms))
        return cls(ttft, itl)

    def __bool__(self) -> bool:
        return self.ttft_seconds is not None or self.itl_seconds is not None

    def over(self, default: LatencyTargets) -> LatencyTargets:
        """These targets, each that there is not replaced by the default's."""
        ttft, itl = self.ttft_seconds, self.itl_seconds
        return LatencyTargets(
            default.ttft_seconds if ttft is None else ttft,
            default.itl_seconds if itl is None else itl,
        )

    def stricter_than(self, allowed: LatencyTargets) -> str | None:
        """The first target that is shorter than the allowed one, `ttft` or `itl`. Where none is
        allowed, any is too short."""
        if _or_never(self.ttft_seconds) < _or_never(allowed.ttft_seconds):
            return "ttft"
        if _or_never(self.itl_seconds) < _or_never(allowed.itl_seconds):
            return "itl"
        return None

    def missed(self, ttft_seconds: float, mean_itl_seconds: float) -> str | None:
        """The first target that a sequence with these latencies missed, `ttft` or `itl`."""
        if self.ttft_seconds is not None and ttft_seconds > self.ttft_seconds:
            return "ttft"
        if self.itl_seconds is not None and mean_itl_seconds > self.itl_seconds:
            return "itl"
        return None


NO_TARGETS = LatencyTargets()


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
