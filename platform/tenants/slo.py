"""A tenant's service level objective."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidValue

MIN_TTFT_MS, MAX_TTFT_MS = 1.0, 3_600_000.0
MIN_ITL_MS, MAX_ITL_MS = 0.1, 60_000.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in milliseconds; None: the server's holds."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    def check(self) -> None:
        """Raises InvalidValue."""
        _check("slo.ttft_ms", self.ttft_ms, MIN_TTFT_MS, MAX_TTFT_MS)
        _check("slo.itl_ms", self.itl_ms, MIN_ITL_MS, MAX_ITL_MS)


NO_SLO = Slo()


def _check(param: str, milliseconds: float | None, least: float, most: float) -> None:
    if milliseconds is not None and not least <= milliseconds <= most:
        raise InvalidValue(f"{param}: must be from {least:g} to {most:g} ms.", param=param)
