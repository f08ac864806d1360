"""Runs scoring processes: see `scoring_child`."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from contextlib import suppress

import msgspec
import structlog

from ...adapters.child import start_child
from .scoring_task import Outcome, ScoringTask

log = structlog.get_logger(__name__)

WALL_SECONDS = 300.0
_MODULE = f"{__package__}.scoring_child"
_MAX_OUTCOME_BYTES = 16 << 20
_MAX_LOG_BYTES = 4096


class ScoringFailed(Exception):
    """The process exceeded a limit, or ended without an outcome."""


class Scoring:
    """The scoring processes of a server. `run` may be called in several threads."""

    def __init__(self) -> None:
        self._children: set[subprocess.Popen[bytes]] = set()

    def run(self, task: ScoringTask) -> Outcome:
        """The outcome of the task; blocks for at most `WALL_SECONDS`. Raises ScoringFailed, or
        TimeoutError if the machine was too busy to run it."""
        with (
            tempfile.TemporaryFile() as question,
            tempfile.TemporaryFile() as answer,
            tempfile.TemporaryFile() as errors,
        ):
            question.write(msgspec.json.encode(task))
            question.seek(0)
            child = start_child(_MODULE, stdin=question, stdout=answer, stderr=errors)
            status = self._wait(child)
            if status != 0:
                errors.seek(0)
                said = errors.read(_MAX_LOG_BYTES).decode(errors="replace")
                log.warning("scoring_failed", status=status, error=said)
                raise ScoringFailed(_reason(status))
            answer.seek(0)
            content = answer.read(_MAX_OUTCOME_BYTES)
            outcome: Outcome = msgspec.json.decode(content, type=Outcome)
            return outcome

    def kill(self) -> None:
        """End the running processes: nobody waits for their outcomes any more."""
        for child in list(self._children):
            _kill(child)

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """The exit status, negative for a signal."""
        self._children.add(child)
        try:
            return child.wait(WALL_SECONDS)
        except subprocess.TimeoutExpired as exc:  # its own limit is shorter: it did not run
            raise TimeoutError("the scoring process did not run") from exc
        finally:
            self._children.discard(child)
            _kill(child)
            child.wait()


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _reason(status: int) -> str:
    if status in {-signal.SIGXCPU, -signal.SIGKILL}:
        return "The golden set takes too much processor time."
    return "The golden set cannot be scored: it takes too much memory, or is nested too deeply."
