"""An engine's service level objective."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The targets for TTFT and ITL in seconds; None: there is no such target."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_seconds is not None or self.itl_seconds is not None

    def missed(self, ttft_seconds: float, mean_itl_seconds: float) -> str | None:
        """The first target that a sequence with these latencies missed, `ttft` or `itl`."""
        if self.ttft_seconds is not None and ttft_seconds > self.ttft_seconds:
            return "ttft"
        if self.itl_seconds is not None and mean_itl_seconds > self.itl_seconds:
            return "itl"
        return None
