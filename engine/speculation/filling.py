"""Chooses the number of draft tokens per request that maximizes the rate of a step.

The rate is (tokens that the step yields) / (seconds that it takes). Draft tokens add to both. The
seconds grow linearly. The expected tokens of a request grow ever more slowly, since each further
draft token is less likely to be accepted. So the draft tokens are sorted by what they yield per
second, and taken while that exceeds the rate so far. This is optimal: let r be the highest rate of
any choice. A choice that reaches r also maximizes (tokens - r · seconds), whose maximum is 0, and
there each draft token counts independently: it belongs to the choice exactly if it yields more than
r per second (Dinkelbach 1967). Taking a draft token that yields more than the rate so far raises
the rate, but not above that token's own yield, so the rate rises to r and stops there. If the
number of draft tokens is limited and all cost the same, the most likely ones are taken first, which
is optimal too.

If a draft token yields more per second than the one before it, because the first has an additional
cost or because of a tree's order, both are taken together or not at all, which makes the yields
decrease again (the concave hull of the request's choices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple


class Effort(NamedTuple):
    """A yield, and its duration in seconds."""

    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return _rate(self.num_tokens, self.seconds)

    def plus(self, num_tokens: float, seconds: float) -> Effort:
        return Effort(self.num_tokens + num_tokens, self.seconds + seconds)


def _rate(num_tokens: float, seconds: float) -> float:
    if seconds > 0:
        return num_tokens / seconds
    return inf if num_tokens > 0 else 0.0


class Offer(NamedTuple):
    """The possible drafts of requests with the same expectation."""

    proposer: str
    num_requests: int
    gains: Sequence[float]
    """For each further draft token how many it is expected to yield."""
    token_seconds: float
    """The cost of each of them."""
    request_seconds: float = 0.0
    """The cost of calling at all, per request."""

    def best_rate(self, plain: Effort, call_seconds: float) -> float:
        """The best rate of a step that is `plain` without draft tokens; at least that step's."""
        num_tokens = plain.num_tokens
        seconds = plain.seconds + call_seconds + self.num_requests * self.request_seconds
        best = plain.rate
        for gain in self.gains:
            num_tokens += self.num_requests * gain
            seconds += self.num_requests * self.token_seconds
            best = max(best, num_tokens / seconds)
        return best


class Filling(NamedTuple):
    num_draft_tokens: list[list[int]]
    """For each offer and each of its requests; within an offer the most first."""
    step: Effort
    """With the draft tokens."""


def fill(
    offers: Sequence[Offer],
    *,
    plain: Effort,
    num_free_tokens: int,
    call_seconds: Mapping[str, float],
) -> Filling:
    """Choose for a step that is `plain` without draft tokens and has room for `num_free_tokens`.

    `call_seconds`: the cost of calling each proposer, independent of the number of tokens. A
    proposer that is not worth its calls is excluded, then the next; with one proposer this is
    exact.
    """
    used = {offer.proposer: call_seconds[offer.proposer] for offer in offers}
    while True:
        filler = _Filler(offers, plain, num_free_tokens, used)
        filler.run()
        poor = filler.poorest()
        if poor is None:
            return Filling(filler.num_draft_tokens, filler.step)
        del used[poor]


class _Bundle(NamedTuple):
    """Draft tokens for one request that are taken together."""

    rate: float
    offer: int
    num_draft_tokens: int
    num_tokens: float
    seconds: float


class _Filler:
    """Fills a step with the draft tokens of just these proposers."""

    def __init__(
        self,
        offers: Sequence[Offer],
        plain: Effort,
        num_free_tokens: int,
        call_seconds: Mapping[str, float],
    ) -> None:
        self.num_draft_tokens = [[0] * offer.num_requests for offer in offers]
        self.step = Effort(plain.num_tokens, plain.seconds + sum(call_seconds.values()))
        self._offers = offers
        self._won = {name: Effort(0.0, seconds) for name, seconds in call_seconds.items()}
        self._num_free_tokens = num_free_tokens

    def run(self) -> None:
        num_tokens, seconds = self.step
        num_reached = [offer.num_requests for offer in self._offers]
        for _, index, size, more_tokens, more_seconds in self._bundles():
            if more_tokens * seconds <= num_tokens * more_seconds:
                break
            # If a draft token has no room, neither have those that follow it.
            num_reached[index] = count = min(num_reached[index], self._num_free_tokens // size)
            self._take(index, count, size)
            added = Effort(count * more_tokens, count * more_seconds)
            num_tokens += added.num_tokens
            seconds += added.seconds
            proposer = self._offers[index].proposer
            self._won[proposer] = self._won[proposer].plus(*added)
        self.step = Effort(num_tokens, seconds)

    def poorest(self) -> str | None:
        """The proposer without which the step would be better by most; None if each is worth it."""
        rates = {name: won.rate for name, won in self._won.items() if won.seconds}
        poorest = min(rates, key=rates.__getitem__, default=None)
        return None if poorest is None or rates[poorest] > self.step.rate else poorest

    def _num_worth(self, offer: Offer) -> int:
        """The number of its first draft tokens that may be taken: the last must be worth its own
        time."""
        least = self.step.rate * offer.token_seconds
        number = min(len(offer.gains), self._num_free_tokens)
        while number and offer.gains[number - 1] <= least:
            number -= 1
        return number

    def _take(self, offer: int, num_requests: int, num_draft_tokens: int) -> None:
        draft_tokens = self.num_draft_tokens[offer]
        for request in range(num_requests):
            draft_tokens[request] += num_draft_tokens
        self._num_free_tokens -= num_requests * num_draft_tokens

    def _bundles(self) -> list[_Bundle]:
        """The worthwhile bundles, the highest rate first; within an offer in their order."""
        plain = self.step.rate
        bundles = [
            bundle
            for index, offer in enumerate(self._offers)
            if offer.proposer in self._won
            for bundle in _cut(index, offer, self._num_worth(offer))
            if bundle[0] > plain
        ]
        return sorted(bundles, key=itemgetter(0), reverse=True)


def _cut(index: int, offer: Offer, num_draft_tokens: int) -> list[_Bundle]:
    """The offer's first draft tokens, in bundles of falling rates."""
    bundles: list[_Bundle] = []
    seconds = offer.request_seconds + offer.token_seconds
    for num_tokens in offer.gains[:num_draft_tokens]:
        size, rate = 1, _rate(num_tokens, seconds)
        while bundles and rate > bundles[-1][0]:
            _, _, more, more_tokens, more_seconds = bundles.pop()
            size += more
            num_tokens += more_tokens
            seconds += more_seconds
            rate = _rate(num_tokens, seconds)
        bundles.append(_Bundle(rate, index, size, num_tokens, seconds))
        seconds = offer.token_seconds
    return bundles
