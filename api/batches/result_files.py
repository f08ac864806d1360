"""The output and the error file of a batch, while they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from ...platform.batches.models import BatchResult


class ResultFiles:
    """Two files with a line per result."""

    def __init__(self, output: Path, errors: Path) -> None:
        self.num_completed = 0
        self.num_failed = 0
        self.last = -1
        """The number of the last line with a result; -1: none."""
        self._output = output.open("wb")
        self._errors = errors.open("wb")

    def add(self, result: BatchResult) -> None:
        """Add the result of the next line that has one."""
        self.last = result.number
        self.num_completed += result.is_success
        self.num_failed += not result.is_success
        file = self._output if result.is_success else self._errors
        file.write(result.content + b"\n")

    def add_unanswered(self, content: bytes) -> None:
        """Add the error of a line without a result."""
        self._errors.write(content + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._errors.close()
