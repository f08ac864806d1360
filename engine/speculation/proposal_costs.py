"""The cost of one proposer's drafting, learned from its calls."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduling.least_squares import RelativeLeastSquares


class ProposalCosts:
    """seconds ≈ per call + per request + per draft token + per place of the longest draft.

    A place is the cost that a token-by-token proposer pays once for all requests: one pass of its
    model. Calls for single requests cannot separate these costs, so they are attributed to the call
    and the place, until calls for several requests show the cost per request. Without observations
    the cost is zero.
    """

    def __init__(self) -> None:
        self._model = RelativeLeastSquares(num_features=4)
        self.total_seconds = 0.0
        """The duration of all calls."""
        self.call_seconds = 0.0
        self.request_seconds = 0.0
        """Whether or not it yields a draft token."""
        self.token_seconds = 0.0
        self.place_seconds = 0.0

    def predict(self, lengths: Sequence[int]) -> float:
        """The duration of a call that gives its requests drafts of these lengths."""
        once = self.call_seconds + max(lengths) * self.place_seconds
        return once + len(lengths) * self.request_seconds + sum(lengths) * self.token_seconds

    def observe(self, lengths: Sequence[int], seconds: float) -> None:
        """A call with drafts of these `lengths` took this long.

        The first call is ignored, because it includes one-time allocation and compilation.
        """
        if self.total_seconds > 0 and seconds > 0:
            longest = max(lengths)
            further = len(lengths) - 1, sum(lengths) - longest
            self._model.observe((1.0, float(longest), *map(float, further)), seconds)
            first, place, self.request_seconds, self.token_seconds = self._model.coefficients
            self.call_seconds = max(0.0, first - self.request_seconds)
            self.place_seconds = max(0.0, place - self.token_seconds)
        self.total_seconds += seconds
