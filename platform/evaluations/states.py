"""The states of an evaluation, and the changes between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ..errors import InvalidTransition


class EvaluationState(StrEnum):
    """The state of an evaluation."""

    QUEUED = "queued"
    """No request was asked yet."""
    RUNNING = "running"
    """Its batches are answered, or its answers are scored."""
    SUCCEEDED = "succeeded"
    """It has a report, with a regression or not."""
    FAILED = "failed"
    CANCELLED = "cancelled"


OPEN_STATES = frozenset({EvaluationState.QUEUED, EvaluationState.RUNNING})
"""Of an evaluation that has not ended."""

TRANSITIONS: Mapping[EvaluationState, frozenset[EvaluationState]] = {
    EvaluationState.QUEUED: frozenset(
        {EvaluationState.RUNNING, EvaluationState.FAILED, EvaluationState.CANCELLED}
    ),
    EvaluationState.RUNNING: frozenset(
        {EvaluationState.SUCCEEDED, EvaluationState.FAILED, EvaluationState.CANCELLED}
    ),
    EvaluationState.SUCCEEDED: frozenset(),
    EvaluationState.FAILED: frozenset(),
    EvaluationState.CANCELLED: frozenset(),
}


def check_transition(current: EvaluationState, target: EvaluationState) -> None:
    """Raises InvalidTransition."""
    if target not in TRANSITIONS[current]:
        raise InvalidTransition(current, target)
