"""Asks lines of requests in a batch, and keeps the answers in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.requests import Line, bodies_of, encoded
from .batch_job import BatchJob
from .batch_run import check_batch, run_batch
from .client import ApiClient
from .exit_codes import CommandFailed


class BatchAnswers:
    """The batches of a command. A batch has two files in the folder: its lines and its answers.

    Lines that have their answers are not asked again. After an interruption, the same lines
    continue.
    """

    def __init__(self, client: ApiClient, folder: Path, *, is_quiet: bool) -> None:
        self._client = client
        self._folder = folder
        self._is_quiet = is_quiet

    def ask(self, name: str, lines: Sequence[Line]) -> list[dict[str, Any]]:
        """The bodies of the answers, in the order of the lines. Raises CommandFailed if a line has
        none."""
        file = self._folder / f"{name}.jsonl"
        answers, errors = (self._folder / f"{name}.{kind}.jsonl" for kind in ("out", "errors"))
        content = encoded(lines)
        if not file.exists() or file.read_bytes() != content:
            answers.unlink(missing_ok=True)  # first: they are not those of the new lines
            file.write_bytes(content)
        job = BatchJob.open(file, answers)
        if job.is_begun or not answers.exists():
            batch = run_batch(self._client, job, answers, errors, is_quiet=self._is_quiet)
            try:
                check_batch(batch, answers, errors)
            except CommandFailed:
                answers.unlink(missing_ok=True)  # a repetition asks again
                raise
        return bodies_of(answers, lines)
