"""Counts the tokens of a job's steps, each step once."""

from __future__ import annotations


class TokenCount:
    """The tokens of all steps up to the highest one that is known.

    A trainer that goes on from a checkpoint repeats the steps after it: those are counted already.
    If reports of steps were lost, the total of the next trainer's start, of the next checkpoint or
    of the end has their tokens.
    """

    def __init__(self, step: int, num_tokens: int) -> None:
        self.step = step
        self.num_tokens = num_tokens

    def note_step(self, step: int, num_tokens: int) -> None:
        """The tokens of one step."""
        if step == self.step + 1:
            self.step = step
            self.num_tokens += num_tokens

    def note_total(self, step: int, num_tokens: int) -> None:
        """The tokens of all steps up to this one."""
        if step >= self.step:
            self.step = step
            self.num_tokens = max(self.num_tokens, num_tokens)
