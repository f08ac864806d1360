"""One memory for two holders, and the border between them. Pure and torch-free.

Each holder reports the seconds that it has just lost for want of a little more memory: the adapters
by loading again what they had evicted, the KV cache by computing again what it had evicted. The
border moves towards the holder that has lost more, one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL_SECONDS = 0.5
"""Between two decisions."""
HALF_LIFE_SECONDS = 2.0
"""Of a loss's weight, if the memory is filled in a moment."""
HYSTERESIS = 1.5
"""The border moves if one holder loses so many times as much as the other."""
LEAST_LOSS = 0.01
"""The least part of the time that a holder must lose before the border moves for it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the border may not cross, in bytes."""

    total: int
    least_adapters: int
    least_kv: int
    step: int
    """The border moves by so many bytes."""

    @property
    def most_adapters(self) -> int:
        return self.total - self.least_kv

    @property
    def most_kv(self) -> int:
        return self.total - self.least_adapters

    @property
    def reach(self) -> int:
        """How much more memory a loss must have been avoidable with to count."""
        return 4 * self.step


class Budget:
    """Decides how many bytes of the memory the adapters have; the KV cache has the rest."""

    def __init__(
        self,
        bounds: Bounds,
        adapter_bytes: int,
        now: float,
        *,
        half_life_seconds: float = HALF_LIFE_SECONDS,
    ) -> None:
        """`adapter_bytes`: at the start. `now`: on the clock that `decide` gets.
        `half_life_seconds`: of a loss's weight."""
        assert bounds.least_adapters <= adapter_bytes <= bounds.most_adapters
        self.bounds = bounds
        self.adapter_bytes = adapter_bytes
        self._adapter_loss = self._kv_loss = 0.0
        self._half_life_seconds = half_life_seconds
        self._decided_at = now

    def is_due(self, now: float) -> bool:
        return now - self._decided_at >= INTERVAL_SECONDS

    def decide(
        self, adapter_seconds: float, kv_seconds: float, now: float, *, needed: int = 0
    ) -> int:
        """The bytes that the adapters should have from now on.

        `adapter_seconds`, `kv_seconds`: lost since the last decision. `needed`: bytes of the
        largest adapter that waits for room; it comes first.
        """
        elapsed = now - self._decided_at
        self._decided_at = now
        kept = 0.5 ** (elapsed / self._half_life_seconds)
        self._adapter_loss = self._adapter_loss * kept + adapter_seconds
        self._kv_loss = self._kv_loss * kept + kv_seconds
        wanted = self.adapter_bytes + self._direction() * self.bounds.step
        within = min(max(wanted, self.bounds.least_adapters), self.bounds.most_adapters)
        steps_needed = -(-needed // self.bounds.step)
        self.adapter_bytes = max(
            within, min(steps_needed * self.bounds.step, self.bounds.most_adapters)
        )
        return self.adapter_bytes

    def _direction(self) -> int:
        """1: towards more for the adapters; -1: towards more for the KV cache."""
        least = LEAST_LOSS * self._half_life_seconds
        if self._adapter_loss > max(least, HYSTERESIS * self._kv_loss):
            return 1
        if self._kv_loss > max(least, HYSTERESIS * self._adapter_loss):
            return -1
        return 0
