"""Errors of the fleet."""

from __future__ import annotations

from ..errors import NotNow

RETRY_SECONDS = 1.0
"""A restarted engine is ready again after seconds."""


class NoReplicaReady(NotNow):
    """No replica accepts requests now."""

    def __init__(self) -> None:
        super().__init__(retry_after_seconds=RETRY_SECONDS)
