"""What a request's output begins with, and how its reasoning is read and returned."""

from __future__ import annotations

from dataclasses import dataclass

from .reasoning_format import Beginning, ReasoningFormat
from .reasoning_split import ReasoningSplit


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of a request's outputs."""

    format: ReasoningFormat
    beginning: Beginning
    is_returned: bool = True
    """False: the caller gets the answer only."""

    def split(self) -> ReasoningSplit:
        """Separates the reasoning of one output from its answer."""
        return ReasoningSplit(self.format, self.beginning)
