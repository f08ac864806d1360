"""The recent acceptance rate of a proposer, by place in the draft."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, repeat

MEMORY = 0.97
"""The factor of earlier weights per step with drafts: a half-life of 23 steps."""
PRIOR_WEIGHT = 4.0
"""The number of drafts that the prior of a first token counts for; it decays like observations."""
FALL_WEIGHT = 2.0
"""The number of drafts that the estimate for a place from earlier places counts for."""
LEAST_WEIGHT = 1e-3
"""The minimum weight of a prior, which decides without observations."""
FIRST_GUESS = 0.6
"""The initial acceptance probability of a token, given that the one before it was accepted."""


class AcceptanceRates:
    """The acceptance probability of each place in a draft.

    Places are in the proposer's order and independent, not conditional on other places. So chains
    and trees are treated alike, and the sum over the first k is the expected number of accepted
    tokens of a draft of k. Places that were not tried recently are assumed to decline like the
    places before them.
    """

    def __init__(self, max_tokens: int, prior: AcceptanceRates | None = None) -> None:
        """`prior`: the estimate until there are observations; None: moderate."""
        self._prior = prior
        self._prior_weight = PRIOR_WEIGHT
        self._num_tried = [0.0] * max_tokens
        self._num_accepted = [0.0] * max_tokens
        self._probabilities: list[float] | None = None

    @property
    def probabilities(self) -> Sequence[float]:
        """For each place: between 0 and 1."""
        if self._probabilities is None:
            self._probabilities = self._estimate()
        return self._probabilities

    def forget(self, memory: float = MEMORY) -> None:
        """Decay the weight of earlier observations."""
        self._num_tried = [memory * value for value in self._num_tried]
        self._num_accepted = [memory * value for value in self._num_accepted]
        self._prior_weight *= memory
        self._probabilities = None

    def observe(self, num_tokens: int, accepted: Collection[int]) -> None:
        """A draft of this many tokens was verified; `accepted`: the places that were correct."""
        for place in range(min(num_tokens, len(self._num_tried))):
            self._num_tried[place] += 1
        for place in accepted:
            self._num_accepted[place] += 1
        self._probabilities = None

    def _estimate(self) -> list[float]:
        usual = _falls(self._prior.probabilities) if self._prior else repeat(FIRST_GUESS)
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
    """The ratio of each place to the one before it, at most 1."""
    return map(_ratio, probabilities, chain((1.0,), probabilities))


def _ratio(value: float, before: float) -> float:
    return min(1.0, value / before) if before else 0.0
