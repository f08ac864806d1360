"""The states of a fine-tuning job, in the words of OpenAI's API, and the changes between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ..errors import InvalidTransition


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    """It waits for a server that trains it."""
    RUNNING = "running"
    """A server trains it, or will go on after a restart."""
    PAUSED = "paused"
    """By its owner or because of a limit; its checkpoint is kept."""
    SUCCEEDED = "succeeded"
    """Its adapter is a version."""
    FAILED = "failed"
    CANCELLED = "cancelled"


class PauseReason(StrEnum):
    """Why a job was paused."""

    REQUESTED = "requested"
    """Its owner has paused it."""
    TRAINED_TOKENS = "trained_tokens"
    """The tenant has no tokens left to train on in this period."""
    BUDGET = "budget"
    """Nothing is left of a budget of the tenant, or of the user or key that created the job. The
    job goes on when the budget allows it."""


OPEN_STATES = frozenset({JobState.QUEUED, JobState.RUNNING, JobState.PAUSED})
"""Of a job that has not ended."""

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.RUNNING: frozenset(
        {JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def check_transition(current: JobState, target: JobState) -> None:
    """Raises InvalidTransition."""
    if target not in TRANSITIONS[current]:
        raise InvalidTransition(current, target)
