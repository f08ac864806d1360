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


class NoDrafts:
    """Plain decoding."""

    def plan(self, decodes: Collection[Request], num_free_tokens: int) -> Mapping[Request, int]:
        return {}
