"""What one proposer's guessing costs, learned from its calls."""

from __future__ import annotations

from ..least_squares import RelativeLeastSquares


class ProposalCosts:
    """seconds ≈ per call + per request + per guessed token. Nothing observed costs nothing."""

    def __init__(self) -> None:
        self._model = RelativeLeastSquares(num_features=3)
        self.total_seconds = 0.0
        """Of all calls."""

    @property
    def call_seconds(self) -> float:
        return self._model.coefficients[0]

    @property
    def request_seconds(self) -> float:
        """Whether a guess comes of it or not."""
        return self._model.coefficients[1]

    @property
    def token_seconds(self) -> float:
        return self._model.coefficients[2]

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """A call for so many requests guessed so many tokens together.

        The first call is passed over: it pays for what is allocated or compiled once.
        """
        if self.total_seconds > 0 and seconds > 0:
            self._model.observe((1.0, float(num_requests), float(num_tokens)), seconds)
        self.total_seconds += seconds
