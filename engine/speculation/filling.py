"""How many tokens to guess for each request of a step, so that its rate is the highest.

The rate is (tokens that the step yields) / (seconds that it takes). Guesses add to both. The
seconds grow linearly; the tokens of a request grow ever more slowly, since each further guess is
less likely right. So the guesses are sorted by what they yield per second, and taken while that is
more than the rate so far. This is optimal: let r be the highest rate that any choice reaches; a
choice that reaches it also maximizes (tokens - r · seconds), where no choice gets above 0, and
there each guess counts for itself: it belongs to the choice exactly if it yields more than r per
second (Dinkelbach 1967). Taking one that yields more than the rate so far lifts the rate, but not
above what that one yields; so the rate climbs to r and stops there. When the tokens to be guessed
are limited and cost alike, those taken first are the likeliest, which is optimal too.

Where a guess yields more per second than the one before it, because asking for the first costs
something or because of a tree's order, both are taken together or not at all, which makes the
yields fall again (the concave hull of the request's choices).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple


class Effort(NamedTuple):
    """What something yields, and the seconds that it takes."""

    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        if self.seconds > 0:
            return self.num_tokens / self.seconds
        return inf if self.num_tokens > 0 else 0.0

    def plus(self, num_tokens: float, seconds: float) -> Effort:
        return Effort(self.num_tokens + num_tokens, self.seconds + seconds)


class Offer(NamedTuple):
    """What guessing can do for requests of which the same is expected."""

    proposer: str
    num_requests: int
    gains: Sequence[float]
    """For each further guessed token how many it is expected to yield."""
    token_seconds: float
    """What each of them costs."""
    request_seconds: float = 0.0
    """What asking at all costs, for each request."""

    def best_rate(self, plain: Effort, call_seconds: float) -> float:
        """Of a step that is `plain` without any guesses; at least that step's."""
        num_tokens = plain.num_tokens
        seconds = plain.seconds + call_seconds + self.num_requests * self.request_seconds
        best = plain.rate
        for gain in self.gains:
            num_tokens += self.num_requests * gain
            seconds += self.num_requests * self.token_seconds
            best = max(best, num_tokens / seconds)
        return best


class Filling(NamedTuple):
    num_guesses: list[list[int]]
    """For each offer and each of its requests; within an offer the most first."""
    by_proposer: dict[str, Effort]
    """Expected of the guesses, with the calls."""
    step: Effort
    """With the guesses."""


def fill(
    offers: Sequence[Offer],
    *,
    plain: Effort,
    num_free_tokens: int,
    call_seconds: Mapping[str, float],
) -> Filling:
    """Choose for a step that is `plain` without guesses, of which it takes `num_free_tokens`.

    `call_seconds`: what calling each proposer costs the step, however much is asked of it. One that
    is not worth its calls is left out, then the next; with one proposer that is exact.
    """
    used = {offer.proposer: Effort(0.0, call_seconds[offer.proposer]) for offer in offers}
    while True:
        filling = _fill(offers, plain, num_free_tokens, used)
        rates = {
            name: effort.rate for name, effort in filling.by_proposer.items() if effort.seconds
        }
        worst = min(rates, key=rates.__getitem__, default=None)
        if worst is None or rates[worst] > filling.step.rate:
            return filling
        del used[worst]


def _fill(
    offers: Sequence[Offer], plain: Effort, num_free_tokens: int, used: Mapping[str, Effort]
) -> Filling:
    """Ask just these proposers."""
    guesses = [[0] * offer.num_requests for offer in offers]
    num_reached = [offer.num_requests for offer in offers]
    efforts = dict(used)
    step = plain.plus(0.0, sum(call.seconds for call in used.values()))
    shortened = [offer._replace(gains=offer.gains[:num_free_tokens]) for offer in offers]
    for bundle in _by_rate(shortened, used, above=step.rate):
        if bundle.rate <= step.rate:
            break
        index, size = bundle.offer, bundle.num_guesses
        # Behind guesses that had no room there is none for those that build on them.
        num_reached[index] = count = min(num_reached[index], num_free_tokens // size)
        for request in range(count):
            guesses[index][request] += size
        num_free_tokens -= count * size
        added = count * bundle.gain, count * bundle.seconds
        step = step.plus(*added)
        proposer = offers[index].proposer
        efforts[proposer] = efforts[proposer].plus(*added)
    return Filling(guesses, efforts, step)


class _Bundle(NamedTuple):
    """Guesses for one request that are taken together."""

    rate: float
    offer: int
    num_guesses: int
    gain: float
    seconds: float


def _by_rate(offers: Sequence[Offer], used: Collection[str], above: float) -> list[_Bundle]:
    """Those with a rate above this, the highest first; within an offer in their order."""
    bundles = [
        bundle
        for index, offer in enumerate(offers)
        if offer.proposer in used
        for bundle in _bundles(index, offer)
        if bundle.rate > above
    ]
    return sorted(bundles, key=itemgetter(0), reverse=True)


def _bundles(index: int, offer: Offer) -> list[_Bundle]:
    """Of falling rates."""
    bundles: list[_Bundle] = []
    seconds = offer.request_seconds + offer.token_seconds
    for gain in offer.gains:
        size = 1
        while bundles and Effort(gain, seconds).rate > bundles[-1].rate:
            last = bundles.pop()
            size, gain, seconds = size + last.num_guesses, gain + last.gain, seconds + last.seconds
        bundles.append(_Bundle(Effort(gain, seconds).rate, index, size, gain, seconds))
        seconds = offer.token_seconds
    return bundles
