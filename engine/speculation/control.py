"""Chooses the number of draft tokens and the proposer of each request.

The control tracks, per adapter version and proposer, the acceptance rate of each place in a draft
(`acceptance`); per proposer, the cost of drafting (`proposal_costs`) and the excess over the
predicted duration of steps with its drafts (`overruns`); and the cost of another row in a step
(`step_costs`). From these it chooses the drafts with the highest rate (`filling`): many draft
tokens while a step is limited by memory bandwidth and another row is nearly free, few or none in a
full batch. Some steps draft less, for comparison (`contrasts`). Where nothing is drafted, an
occasional small draft tests whether this is still right (`probes`). Torch-free, without a clock,
and deterministic.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from ..messages import ProposerTotals, SpeculationParams, SpeculationStats
from ..request import Request
from ..scheduling.step_costs import StepCosts, StepShape
from . import probes
from .contrasts import Contrasts
from .filling import Effort, Offer, fill
from .overruns import Overruns
from .probes import ProbeBudget
from .proposal_costs import ProposalCosts
from .track import Track

MAX_ADAPTERS = 2048
"""The number of adapters with statistics; the one that decoded least recently is dropped first."""
MAX_STATS = 200
"""In a snapshot."""
LEAST_COST = 0.01
"""A draft token costs at least this part of a normal token: smaller measurements are noise, and a
draft token that is accepted less often is not worth proposing."""
FIRST_TOKENS = 4
"""Draft tokens in a step before any were drafted; then at most twice the maximum so far, because
the cost of more is unknown."""
LONGEST_REST = 8
"""In steps. The gain of drafting grows with a sequence or a cost, so it does not change faster; and
a decision costs a hundredth of a small model's step."""


class Choice(NamedTuple):
    """The chosen draft of one request."""

    proposer: str
    num_tokens: int


class _Group(NamedTuple):
    """Requests of a step that are alike to the control."""

    requests: list[Request]
    tracks: Mapping[str, Track]
    """The tracks of the proposers that may draft for them."""


@dataclass(slots=True)
class _Step:
    """The next step, while its drafts are chosen."""

    expected: Effort
    num_sequences: int
    num_free_tokens: int
    verify_seconds: float
    """The cost of verifying a draft token."""
    token_seconds: dict[str, float] = field(default_factory=dict)
    """The cost per token of each proposer, drafting and verification."""
    choices: dict[Request, Choice] = field(default_factory=dict)

    def choose(self, request: Request, proposer: str, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self.num_free_tokens)
        if num_tokens > 0:
            self.choices[request] = Choice(proposer, num_tokens)
            self.num_free_tokens -= num_tokens

    def share_places(self, name: str, costs: ProposalCosts, num_requests: int) -> None:
        """Share the proposer's next places among this many requests."""
        shared = costs.place_seconds / num_requests
        self.token_seconds[name] = self.verify_seconds + costs.token_seconds + shared


@dataclass(slots=True)
class _Running:
    """A step that was decided, while its results become known."""

    seconds: float = 0.0
    """The predicted duration; 0: unknown."""
    proposers: list[str] = field(default_factory=list)
    """The proposers of the step."""


class Control:
    def __init__(self, proposers: Sequence[str], *, max_tokens: int, costs: StepCosts) -> None:
        """`proposers`: their names, the preferred one first. `costs`: the caller updates them."""
        self._proposers = tuple(proposers)
        self._max_tokens = max_tokens
        self._costs = costs
        self._proposal_costs = {name: ProposalCosts() for name in proposers}
        self._overall = {name: Track(max_tokens) for name in proposers}
        self._adapters: OrderedDict[AdapterKey | None, dict[str, Track]] = OrderedDict()
        self._probe_budget = ProbeBudget()
        self._overruns = Overruns(proposers)
        self._running = _Running()
        self._step = 0
        self._contrasts = Contrasts()
        self._most_tokens = FIRST_TOKENS // 2
        self._last_decision = 0
        """The step of the last one that was decided on."""
        self._num_idle = 0
        """Decisions to propose nothing, since the last to propose something."""
        self._rest = range(0)
        """The steps for which nothing is drafted, for exactly these requests:"""
        self._resting: list[Request] = []

    # --- what to propose --------------------------------------------------------------------------

    def choose(self, decodes: Collection[Request], num_free_tokens: int) -> dict[Request, Choice]:
        """For each worthwhile request the draft to propose, the most worthwhile first.

        Until the cost of steps is known, only explicit requests are followed.
        """
        self._step += 1
        self._running = _Running()
        if self._step in self._rest and list(decodes) == self._resting:
            return {}
        choices = self._decide(decodes, num_free_tokens)
        self._last_decision = self._step
        return choices

    def _decide(self, decodes: Collection[Request], num_free_tokens: int) -> dict[Request, Choice]:
        self._rest = range(0)
        step = self._expect(decodes, num_free_tokens)
        self._running.seconds = step.expected.seconds
        groups = []
        for asked, group in self._group(decodes):
            if asked is None or asked.num_tokens is None:
                groups.append(group)
            else:
                self._obey(asked.num_tokens, group, step)
        if step.expected.seconds > 0:
            self._fill(groups, step)
            self._probe(groups, step)
            self._rest = self._plan_rest(groups, step)
            self._resting = list(decodes)
        return step.choices

    def _plan_rest(self, groups: Iterable[_Group], step: _Step) -> range:
        """The next steps for which it need not be asked again whether drafting pays.

        The longer nothing was drafted, the more of them; a probe that is due now and was too dear
        waits for their end too.
        """
        tracks = [track for group in groups for track in group.tracks.values()]
        if step.choices or any(track.planned for track in tracks):
            self._num_idle = 0
            return range(0)
        self._num_idle += 1
        due = [track.probe_times.next_step for track in tracks]
        later = [number for number in due if number > self._step]
        return range(self._step + 1, min([*later, self._step + min(self._num_idle, LONGEST_REST)]))

    def _expect(self, decodes: Collection[Request], num_free_tokens: int) -> _Step:
        """The step without draft tokens."""
        context = sum([request.num_computed_tokens for request in decodes])
        seconds = self._costs.predict(StepShape(0, len(decodes), context))
        least = LEAST_COST * seconds / max(len(decodes), 1)
        verify = max(self._costs.draft_token_seconds(), least)
        # A draft token that keeps a step from being replayed would cost several steps.
        num_free = self._costs.num_graph_rows_left(len(decodes), max(num_free_tokens, 0))
        step = _Step(Effort(len(decodes), seconds), len(decodes), num_free, verify)
        for name, costs in self._proposal_costs.items():
            step.share_places(name, costs, max(len(decodes), 1))
        return step

    def _group(self, decodes: Iterable[Request]) -> list[tuple[SpeculationParams | None, _Group]]:
        """Requests grouped by adapter and parameters; without those that disable speculation or
        name an unknown proposer."""
        alike: dict[tuple[AdapterKey | None, SpeculationParams | None], list[Request]]
        alike = defaultdict(list)
        for request in decodes:
            asked = request.submitted.speculation
            if asked is None or asked.num_tokens != 0:
                alike[request.line, asked].append(request)
        groups = []
        for (line, asked), requests in alike.items():
            tracks = self._use(line)
            if asked is not None and asked.proposer is not None:
                tracks = {name: tracks[name] for name in tracks if name == asked.proposer}
            for track in tracks.values():
                track.planned = 0
            if tracks:
                groups.append((asked, _Group(requests, tracks)))
        return groups

    def _obey(self, num_tokens: int, group: _Group, step: _Step) -> None:
        """Draft the number of tokens that the request specifies."""
        num_tokens = min(num_tokens, self._max_tokens)
        name = self._best(group, step)
        for request in group.requests:
            step.choose(request, name, num_tokens)
        group.tracks[name].planned = num_tokens
        offer, number = self._offer(name, group, step), len(group.requests)
        step.expected = step.expected.plus(
            number * sum(offer.gains[:num_tokens]),
            number * (offer.request_seconds + num_tokens * offer.token_seconds),
        )

    def _best(self, group: _Group, step: _Step) -> str:
        """The proposer with the best rate if it drafts for this group only; the first if none pays
        off."""
        names = list(group.tracks)
        if len(names) == 1 or not step.expected.seconds:
            return names[0]
        return max(names, key=lambda name: self._rate(name, group, step))

    def _rate(self, name: str, group: _Group, step: _Step) -> float:
        if not self._may_pay(group.tracks[name], step.token_seconds[name], step):
            return step.expected.rate
        return self._offer(name, group, step).best_rate(step.expected, self._call_seconds(name))

    def _call_seconds(self, name: str) -> float:
        """The cost of calling a proposer."""
        return self._proposal_costs[name].call_seconds + self._overruns.of(name)

    def _offer(self, name: str, group: _Group, step: _Step) -> Offer:
        track = group.tracks[name]
        return Offer(
            proposer=name,
            num_requests=len(group.requests),
            gains=track.gains(self._max_tokens),
            token_seconds=track.supply.share * step.token_seconds[name],
            request_seconds=self._proposal_costs[name].request_seconds,
        )

    def _may_pay(self, track: Track, token_seconds: float, step: _Step) -> bool:
        """Whether any draft token would pay off if calling the proposer were free; cheap to
        compute."""
        return max(track.acceptance.probabilities) > step.expected.rate * token_seconds

    def _fill(self, groups: Sequence[_Group], step: _Step) -> None:
        """Choose the drafts with the best rate for the step."""
        offering = self._offering(groups, step)
        if not offering:
            return
        offers = [self._offer(name, group, step) for name, group in offering]
        filling = fill(
            offers,
            plain=step.expected,
            num_free_tokens=min(step.num_free_tokens, 2 * self._most_tokens),
            call_seconds={name: self._call_seconds(name) for name in self._proposers},
        )
        num_tokens = sum(map(sum, filling.num_draft_tokens))
        if not num_tokens:
            return
        step.expected = filling.step
        part = self._contrasts.part(step.num_sequences)
        self._most_tokens = max(self._most_tokens, int(part * num_tokens))
        filled = zip(offers, offering, filling.num_draft_tokens, strict=True)
        for offer, (_, group), num_draft_tokens in sorted(filled, key=lambda it: -it[0].gains[0]):
            group.tracks[offer.proposer].planned = max(num_draft_tokens)
            for request, number in zip(group.requests, num_draft_tokens, strict=True):
                step.choose(request, offer.proposer, int(part * number))

    def _offering(self, groups: Sequence[_Group], step: _Step) -> list[tuple[str, _Group]]:
        """The groups for which drafting may pay off, each with its best proposer.

        First as if each proposer drafted for the whole step, then with the cost of a place divided
        among the remaining groups.
        """
        noise = LEAST_COST * step.expected.seconds
        num_sharing = dict.fromkeys(self._proposers, step.num_sequences)
        while True:
            chosen = ((self._best(group, step), group) for group in groups)
            paying = [
                (name, group)
                for name, group in chosen
                if self._may_pay(group.tracks[name], step.token_seconds[name], step)
            ]
            asked: Counter[str] = Counter()
            for name, group in paying:
                asked[name] += len(group.requests)
            fewer = {name: asked[name] for name in asked if asked[name] < num_sharing[name]}
            if not any(self._proposal_costs[name].place_seconds > noise for name in fewer):
                return paying
            num_sharing |= fewer
            for name, number in fewer.items():
                step.share_places(name, self._proposal_costs[name], number)

    # --- probes -----------------------------------------------------------------------------------

    def _probe(self, groups: Iterable[_Group], step: _Step) -> None:
        """Probe the groups that were not drafted for a long time, within the time budget."""
        self._probe_budget.earn(step.expected.seconds, self._step - self._last_decision)
        for group in groups:
            for name, track in group.tracks.items():
                if not track.planned and track.probe_times.is_due(self._step):
                    self._probe_one(name, group, step)

    def _probe_one(self, name: str, group: _Group, step: _Step) -> None:
        request = group.requests[self._step % len(group.requests)]
        left = request.submitted.sampling.max_tokens - request.num_generated_tokens
        if left < 2 or step.token_seconds[name] * step.expected.rate >= 1:
            return  # not even a token that is surely right would pay
        replaced = step.choices.get(request)
        num_tokens = min(probes.NUM_TOKENS, self._max_tokens)
        num_free = step.num_free_tokens + (replaced.num_tokens if replaced else 0)
        price = self._probe_seconds(name, num_tokens, step)
        if replaced:
            lost = group.tracks[replaced.proposer].gains(replaced.num_tokens)
            price += sum(lost) / step.expected.rate
        if num_tokens <= num_free and self._probe_budget.spend(price, step.expected.seconds):
            step.num_free_tokens = num_free
            step.choose(request, name, num_tokens)
            group.tracks[name].probe_times.begin(self._step)

    def _probe_seconds(self, name: str, num_tokens: int, step: _Step) -> float:
        seconds = self._proposal_costs[name].predict([num_tokens]) + self._overruns.of(name)
        return seconds + num_tokens * step.verify_seconds

    # --- results ---------------------------------------------------------------------------------

    def observe_proposals(
        self, proposer: str, drafts: Sequence[tuple[Request, int]], seconds: float
    ) -> None:
        """The proposer was called once for these requests; `drafts`: the number of tokens for
        each."""
        for request, length in drafts:
            for track in self._tracks_of(request, proposer):
                track.observe_wish(self._step, has_draft=length > 0)
        costs, lengths = self._proposal_costs[proposer], [length for _, length in drafts]
        verify_seconds = sum(lengths) * self._costs.draft_token_seconds()
        self._running.seconds += costs.predict(lengths) + verify_seconds
        self._running.proposers.append(proposer)
        costs.observe(lengths, seconds)

    def observe(
        self, request: Request, proposer: str, num_tokens: int, accepted: Collection[int]
    ) -> None:
        """The request's draft of `num_tokens` was verified; `accepted`: its tokens' places, in the
        proposer's order, that were right."""
        for track in self._tracks_of(request, proposer):
            track.observe(self._step, num_tokens, accepted)

    def observe_step(self, seconds: float) -> None:
        """The step took this long, including deciding and drafting; not called for a step that
        computed prompts or was repeated."""
        if self._running.seconds > 0 and self._costs.knows_draft_tokens:
            self._overruns.observe(self._running.proposers, self._running.seconds, seconds)

    def snapshot(self) -> list[SpeculationStats]:
        """Adapters lately used first, at most MAX_STATS entries."""
        recent = islice(reversed(self._adapters), MAX_STATS // max(len(self._proposers), 1))
        return [stats for key in recent for stats in self.explain(key)]

    def explain(self, key: AdapterKey | None) -> list[SpeculationStats]:
        """The statistics of the proposers for one adapter version; None: the base."""
        tracks = self._adapters.get(key, {})
        return [track.stats(key, name) for name, track in tracks.items()]

    def totals(self) -> list[ProposerTotals]:
        """The sums over all adapters since the start."""
        return [
            ProposerTotals(
                proposer=name,
                num_drafts=track.num_drafts,
                num_draft_tokens=track.num_draft_tokens,
                num_accepted_tokens=track.num_accepted_tokens,
                seconds=self._proposal_costs[name].total_seconds,
            )
            for name, track in self._overall.items()
        ]

    def _tracks_of(self, request: Request, proposer: str) -> tuple[Track, Track]:
        """The tracks of the request's adapter, and of all adapters."""
        return self._use(request.line)[proposer], self._overall[proposer]

    def _use(self, key: AdapterKey | None) -> dict[str, Track]:
        """The statistics of an adapter, marked as used."""
        tracks = self._adapters.get(key)
        if tracks is None:
            tracks = {
                name: Track(self._max_tokens, self._overall[name]) for name in self._proposers
            }
            self._adapters[key] = tracks
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(key)
        return tracks
