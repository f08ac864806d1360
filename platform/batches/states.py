"""The states of a batch, in the words of OpenAI's API, and the changes between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ..errors import InvalidTransition


class BatchState(StrEnum):
    """The state of a batch."""

    VALIDATING = "validating"
    """Its file is to be checked."""
    IN_PROGRESS = "in_progress"
    """Its lines are answered."""
    FINALIZING = "finalizing"
    """No more lines are answered; its results are written to files."""
    CANCELLING = "cancelling"
    """A cancellation was asked for."""
    COMPLETED = "completed"
    FAILED = "failed"
    """Its file was invalid: no line was answered."""
    EXPIRED = "expired"
    """Its completion window ended before all lines were answered."""
    CANCELLED = "cancelled"


OPEN_STATES = frozenset(
    {
        BatchState.VALIDATING,
        BatchState.IN_PROGRESS,
        BatchState.FINALIZING,
        BatchState.CANCELLING,
    }
)
"""Of a batch that has not ended."""

TRANSITIONS: Mapping[BatchState, frozenset[BatchState]] = {
    BatchState.VALIDATING: frozenset(
        {BatchState.IN_PROGRESS, BatchState.FAILED, BatchState.CANCELLING}
    ),
    BatchState.IN_PROGRESS: frozenset({BatchState.FINALIZING, BatchState.CANCELLING}),
    BatchState.FINALIZING: frozenset({BatchState.COMPLETED, BatchState.EXPIRED}),
    BatchState.CANCELLING: frozenset({BatchState.CANCELLED}),
    BatchState.COMPLETED: frozenset(),
    BatchState.FAILED: frozenset(),
    BatchState.EXPIRED: frozenset(),
    BatchState.CANCELLED: frozenset(),
}


def check_transition(current: BatchState, target: BatchState) -> None:
    """Raises InvalidTransition."""
    if target not in TRANSITIONS[current]:
        raise InvalidTransition(current, target)
