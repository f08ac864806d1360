"""How many tokens to guess, and by whom: follows what is accepted and what a step costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..messages import SpeculationStats
from ..request import Request
from ..step_costs import StepCosts


class Choice(NamedTuple):
    """What one request is to be guessed."""

    proposer: str
    num_tokens: int


class Control:
    """Torch-free."""

    def __init__(self, proposers: Sequence[str], *, max_tokens: int, costs: StepCosts) -> None:
        """`proposers`: their names, the preferred one first."""
        self._proposers = tuple(proposers)
        self._max_tokens = max_tokens
        self._costs = costs

    def choose(self, decodes: Collection[Request], num_free_tokens: int) -> dict[Request, Choice]:
        """For each request that is worth it what to guess, the worthiest first."""
        chosen = {}
        for request in decodes:
            asked = request.submitted.speculation
            proposer = self._proposers[0]
            num_tokens = self._max_tokens
            if asked and asked.proposer is not None:
                proposer = asked.proposer
            if asked and asked.num_tokens is not None:
                num_tokens = min(asked.num_tokens, num_tokens)
            if num_tokens:
                chosen[request] = Choice(proposer, num_tokens)
        return chosen

    def observe(self, request: Request, proposer: str, num_tokens: int, num_accepted: int) -> None:
        """A draft of `num_tokens`, which may be 0, was verified: it held for so many tokens."""

    def observe_proposals(self, proposer: str, num_tokens: int, seconds: float) -> None:
        """Making drafts of `num_tokens` together took so long."""

    def snapshot(self) -> list[SpeculationStats]:
        """Lately used ones first."""
        return []
