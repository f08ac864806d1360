"""Decides when a trainer runs beside the engine: while that is idle, and otherwise a small share.

Serving comes first. Under constant load a job still gets a short turn in every period, so it ends.
"""

from __future__ import annotations

IDLE_SECONDS = 1.0
"""The engine has to be idle for this long before training goes on."""
LONGEST_WAIT_SECONDS = 30.0
"""A trainer that has waited for this long gets a turn, however busy the engine is."""
TURN_SECONDS = 3.0


class Turns:
    """The turns of one trainer. It begins with the right to train."""

    def __init__(self, now: float) -> None:
        """`now`, here and below: seconds of a clock that never goes back."""
        self._may_train = True
        self._busy_at = now - IDLE_SECONDS
        """When the engine was last seen busy."""
        self._paused_at = now
        self._turn_ends_at = now

    def decide(self, now: float, *, is_busy: bool) -> bool:
        """Whether the trainer may run from now on. Call it several times a second."""
        if is_busy:
            self._busy_at = now
        if self._may_train:
            if is_busy and now >= self._turn_ends_at:
                self._may_train, self._paused_at = False, now
        elif now - self._busy_at >= IDLE_SECONDS:
            self._may_train = True
        elif now - self._paused_at >= LONGEST_WAIT_SECONDS:
            self._may_train, self._turn_ends_at = True, now + TURN_SECONDS
        return self._may_train
