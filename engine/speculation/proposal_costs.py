"""The time of one proposer's calls, learned from measurements."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduling.step_costs import RelativeLeastSquares


class ProposalCosts:
    """seconds ≈ per call + per request + per draft token + per position of the longest draft.

    A proposer that drafts token by token runs its model once per position, for all requests
    together. Calls for single requests do not separate the four terms; their time is attributed to
    the call and the positions until calls for several requests show the rest. Without observations
    all costs are 0.
    """

    def __init__(self) -> None:
        self._model = RelativeLeastSquares(num_features=4)
        self.total_seconds = 0.0
        """Sum over all calls."""
        self.call_seconds = 0.0
        self.request_seconds = 0.0
        """Per request, also if its draft is empty."""
        self.token_seconds = 0.0
        self.position_seconds = 0.0

    def predict(self, lengths: Sequence[int]) -> float:
        """The time of a call whose requests get drafts of these lengths."""
        once = self.call_seconds + max(lengths) * self.position_seconds
        return once + len(lengths) * self.request_seconds + sum(lengths) * self.token_seconds

    def observe(self, lengths: Sequence[int], seconds: float) -> None:
        """A call with drafts of these lengths took `seconds`.

        The first call is ignored: it includes one-time allocation and compilation.
        """
        if self.total_seconds > 0 and seconds > 0:
            longest = max(lengths)
            further = len(lengths) - 1, sum(lengths) - longest
            self._model.observe((1.0, float(longest), *map(float, further)), seconds)
            first, place, self.request_seconds, self.token_seconds = self._model.coefficients
            self.call_seconds = max(0.0, first - self.request_seconds)
            self.position_seconds = max(0.0, place - self.token_seconds)
        self.total_seconds += seconds
