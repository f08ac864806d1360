"""Counts the tokens of one sequence's reasoning."""

from __future__ import annotations

from ..tools.reasoning import Reasoning


class ReasoningCount:
    """The tokens up to the one that completes the closing marker, markers included.

    A sequence that does not begin with reasoning has none; one without a closing marker consists of
    them.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._split = reasoning.split()
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        return self._num_read if self._split.has_reasoning else 0

    @property
    def is_final(self) -> bool:
        return self._split.is_over

    def push(self, text: str) -> None:
        """Take the text of the next token, which is empty as long as it is part of a character."""
        if not self._split.is_over:
            self._num_read += 1
            self._split.push(text)
