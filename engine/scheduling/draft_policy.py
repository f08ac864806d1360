"""Draft tokens per request: the scheduler asks for them once the step's decodes are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from ..request import Request


class DraftPolicy(Protocol):
    """Torch-free."""

    def plan(self, decodes: Collection[Request], num_free_tokens: int) -> Mapping[Request, int]:
        """For each request that is worth it how many tokens to propose: 1 or more, in the order of
        their worth.

        `decodes`: who decodes in this step. `num_free_tokens`: what is left of the step's budget.
        What it says is an upper bound: the scheduler takes less where tokens or blocks are short.
        """
        ...

    @property
    def rests(self) -> bool:
        """Whether no draft tokens are due in the next step."""
        ...

    def pass_over(self) -> None:
        """A step is scheduled without a plan: the tokens before the draft tokens are not known."""
        ...


class NoDrafts:
    """Plain decoding."""

    rests = True

    def plan(self, decodes: Collection[Request], num_free_tokens: int) -> Mapping[Request, int]:
        return {}

    def pass_over(self) -> None:
        """There is nothing to plan."""
