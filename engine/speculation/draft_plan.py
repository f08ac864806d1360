"""Choose the number of draft tokens of each request so that the step's token rate is maximal.

The rate is (expected tokens of the step) / (seconds of the step). Draft tokens add to both. The
seconds grow linearly. A request's expected tokens grow ever more slowly, because each further draft
token is less likely to be accepted. The draft tokens are sorted by expected tokens per second and
taken while that exceeds the rate so far. This greedy choice is optimal (Dinkelbach 1967): let r be
the highest rate of any choice. The best choice also maximizes (tokens - r · seconds), whose maximum
is 0, and in that sum each draft token counts separately: it belongs to the best choice exactly if
it yields more than r per second. If the number of draft tokens is limited and all cost the same,
the likeliest are taken first, which is optimal too.

A draft token may yield more per second than the one before it, because the first one also pays for
the call, or because of a tree's order. Then both are taken together or not at all: the yields of
such bundles fall again (the concave hull of the request's choices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple


class StepEstimate(NamedTuple):
    """Expected tokens and seconds of a step, or of a part of it."""

    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return _rate(self.num_tokens, self.seconds)

    def plus(self, num_tokens: float, seconds: float) -> StepEstimate:
        return StepEstimate(self.num_tokens + num_tokens, self.seconds + seconds)


def _rate(num_tokens: float, seconds: float) -> float:
    if seconds > 0:
        return num_tokens / seconds
    return inf if num_tokens > 0 else 0.0


class DraftOption(NamedTuple):
    """Drafting by one proposer for requests with the same expectations."""

    proposer: str
    num_requests: int
    gains: Sequence[float]
    """Expected accepted tokens of each further draft token."""
    token_seconds: float
    """Of each draft token."""
    request_seconds: float = 0.0
    """Of each request, whatever its number of draft tokens."""

    def best_rate(self, plain: StepEstimate, call_seconds: float) -> float:
        """The highest rate of the step `plain` with this option alone, or of `plain` itself."""
        num_tokens = plain.num_tokens
        seconds = plain.seconds + call_seconds + self.num_requests * self.request_seconds
        best = plain.rate
        for gain in self.gains:
            num_tokens += self.num_requests * gain
            seconds += self.num_requests * self.token_seconds
            best = max(best, num_tokens / seconds)
        return best


class DraftPlan(NamedTuple):
    """The draft tokens of a step."""

    num_draft_tokens: list[list[int]]
    """By option and request; within an option in descending order."""
    step: StepEstimate
    """The step with the draft tokens."""


def plan_drafts(
    options: Sequence[DraftOption],
    *,
    plain: StepEstimate,
    num_free_tokens: int,
    call_seconds: Mapping[str, float],
) -> DraftPlan:
    """Add at most `num_free_tokens` draft tokens to the step `plain`.

    `call_seconds`: the fixed cost of calling each proposer. Proposers that do not earn their call
    are removed one after another, the poorest first; with one proposer this is exact.
    """
    used = {option.proposer: call_seconds[option.proposer] for option in options}
    while True:
        planner = _Planner(options, plain, num_free_tokens, used)
        planner.run()
        poor = planner.poorest()
        if poor is None:
            return DraftPlan(planner.num_draft_tokens, planner.step)
        del used[poor]


class _Bundle(NamedTuple):
    """Draft tokens of one request that are taken together."""

    rate: float
    option: int
    num_draft_tokens: int
    num_tokens: float
    seconds: float


class _Planner:
    """Adds the draft tokens of the proposers in `call_seconds` to a step."""

    def __init__(
        self,
        options: Sequence[DraftOption],
        plain: StepEstimate,
        num_free_tokens: int,
        call_seconds: Mapping[str, float],
    ) -> None:
        self.num_draft_tokens = [[0] * option.num_requests for option in options]
        self.step = StepEstimate(plain.num_tokens, plain.seconds + sum(call_seconds.values()))
        self._options = options
        self._won = {name: StepEstimate(0.0, seconds) for name, seconds in call_seconds.items()}
        self._num_free_tokens = num_free_tokens

    def run(self) -> None:
        num_tokens, seconds = self.step
        num_reached = [option.num_requests for option in self._options]
        for _, index, size, more_tokens, more_seconds in self._bundles():
            if more_tokens * seconds <= num_tokens * more_seconds:
                break
            # A request whose draft tokens did not fit gets none of the following ones either.
            num_reached[index] = count = min(num_reached[index], self._num_free_tokens // size)
            self._take(index, count, size)
            added = StepEstimate(count * more_tokens, count * more_seconds)
            num_tokens += added.num_tokens
            seconds += added.seconds
            proposer = self._options[index].proposer
            self._won[proposer] = self._won[proposer].plus(*added)
        self.step = StepEstimate(num_tokens, seconds)

    def poorest(self) -> str | None:
        """The proposer with the lowest rate, if that is below the step's; else None."""
        rates = {name: won.rate for name, won in self._won.items() if won.seconds}
        poorest = min(rates, key=rates.__getitem__, default=None)
        return None if poorest is None or rates[poorest] > self.step.rate else poorest

    def _num_worth(self, option: DraftOption) -> int:
        """How many first draft tokens may be taken: the last must yield more than it costs."""
        least = self.step.rate * option.token_seconds
        number = min(len(option.gains), self._num_free_tokens)
        while number and option.gains[number - 1] <= least:
            number -= 1
        return number

    def _take(self, option: int, num_requests: int, num_draft_tokens: int) -> None:
        draft_tokens = self.num_draft_tokens[option]
        for request in range(num_requests):
            draft_tokens[request] += num_draft_tokens
        self._num_free_tokens -= num_requests * num_draft_tokens

    def _bundles(self) -> list[_Bundle]:
        """Bundles that may raise the rate, highest rate first; within an option in their order."""
        plain = self.step.rate
        bundles = [
            bundle
            for index, option in enumerate(self._options)
            if option.proposer in self._won
            for bundle in _cut(index, option, self._num_worth(option))
            if bundle[0] > plain
        ]
        return sorted(bundles, key=itemgetter(0), reverse=True)


def _cut(index: int, option: DraftOption, num_draft_tokens: int) -> list[_Bundle]:
    """Cut the option's first draft tokens into bundles of falling rates."""
    bundles: list[_Bundle] = []
    seconds = option.request_seconds + option.token_seconds
    for num_tokens in option.gains[:num_draft_tokens]:
        size, rate = 1, _rate(num_tokens, seconds)
        while bundles and rate > bundles[-1][0]:
            _, _, more, more_tokens, more_seconds = bundles.pop()
            size += more
            num_tokens += more_tokens
            seconds += more_seconds
            rate = _rate(num_tokens, seconds)
        bundles.append(_Bundle(rate, index, size, num_tokens, seconds))
        seconds = option.token_seconds
    return bundles
