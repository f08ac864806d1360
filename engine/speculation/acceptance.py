"""Estimated acceptance of each position of a draft, from recent drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, repeat

MEMORY = 0.97
"""The weight of an observation falls by this factor per step with drafts: by half in 23."""
PRIOR_WEIGHT = 4.0
"""Weight of the prior of the first position, in drafts."""
FALL_WEIGHT = 2.0
"""Weight of the estimate that a position inherits from those before it, in drafts."""
LEAST_WEIGHT = 1e-3
"""Least weight of a prior: it decides where there are no observations."""
FIRST_RATE = 0.6
"""Acceptance of a token, given that the one before it is accepted, without any observations."""


class AcceptanceRates:
    """For each position of a draft, the probability that its token is accepted.

    Positions are in the proposer's order. The probabilities are not conditional on other positions,
    so chains and trees are treated alike, and the sum over the first k is the expected number of
    accepted tokens of a draft of k. A position without recent observations is extrapolated from
    those before it.
    """

    def __init__(self, max_tokens: int, prior: AcceptanceRates | None = None) -> None:
        """`prior`: the estimates before there are observations; None: FIRST_RATE."""
        self._prior = prior
        self._prior_weight = PRIOR_WEIGHT
        self._num_tried = [0.0] * max_tokens
        self._num_accepted = [0.0] * max_tokens
        self._probabilities: list[float] | None = None

    @property
    def probabilities(self) -> Sequence[float]:
        """By position, each between 0 and 1."""
        if self._probabilities is None:
            self._probabilities = self._estimate()
        return self._probabilities

    def forget(self, memory: float = MEMORY) -> None:
        """Reduce the weight of past observations."""
        self._num_tried = [memory * value for value in self._num_tried]
        self._num_accepted = [memory * value for value in self._num_accepted]
        self._prior_weight *= memory
        self._probabilities = None

    def observe(self, num_tokens: int, accepted: Collection[int]) -> None:
        """A draft of so many tokens was verified; `accepted`: the places that were right."""
        for place in range(min(num_tokens, len(self._num_tried))):
            self._num_tried[place] += 1
        for place in accepted:
            self._num_accepted[place] += 1
        self._probabilities = None

    def _estimate(self) -> list[float]:
        usual = _falls(self._prior.probabilities) if self._prior else repeat(FIRST_RATE)
        estimates: list[float] = []
        before, fall, weight = 1.0, 0.0, max(self._prior_weight, LEAST_WEIGHT)
        for tried, accepted, usual_fall in zip(
            self._num_tried, self._num_accepted, usual, strict=False
        ):
            expected = before * max(fall, usual_fall)
            value = min(1.0, (accepted + weight * expected) / (tried + weight))
            fall = _ratio(value, before)
            before, weight = value, FALL_WEIGHT
            estimates.append(value)
        return estimates


def _falls(probabilities: Sequence[float]) -> Iterator[float]:
    """What each place is of the one before it, at most 1."""
    return map(_ratio, probabilities, chain((1.0,), probabilities))


def _ratio(value: float, before: float) -> float:
    return min(1.0, value / before) if before else 0.0
