"""Speculation control: chooses proposer and number of draft tokens for each request of a step.

It estimates, per adapter version and proposer, the probability that each draft token is accepted
(`acceptance`); per proposer, the time of drafting (`proposal_costs`) and the time of its steps
beyond their prediction (`step_residuals`); and the time of another row in a step (`step_costs`).
From these it maximizes the step's token rate (`draft_plan`): many draft tokens while a step is
bound by memory bandwidth, few or none in a full batch. Some steps propose fewer, for comparison
(`baseline_steps`). A request without draft tokens is probed now and then (`probes`).
Torch-free and deterministic: it has no clock, and equal observations give equal choices.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from ..config import COPYING_PROPOSERS
from ..messages import ProposerTotals, SpeculationParams, SpeculationStats
from ..request import Request
from ..scheduling.step_costs import StepCosts, StepShape
from . import probes
from .baseline_steps import BaselineSteps
from .draft_plan import DraftOption, StepEstimate, plan_drafts
from .probes import ProbeBudget
from .proposal_costs import ProposalCosts
from .step_residuals import StepResiduals
from .track import Track
from .watch import Watch

LEAST_TOKENS = 3
"""Of an output that drafts can shorten: its first token is the prompt's, and its last is never
computed."""
MAX_ADAPTERS = 2048
"""Adapters with estimates; beyond this number the least recently used is forgotten."""
MAX_STATS = 200
"""Entries of a snapshot."""
LEAST_COST = 0.01
"""Least cost of a draft token, as a share of a plain token's: smaller measurements are noise."""
FIRST_TOKENS = 4
"""Most draft tokens of the first step with any. Later steps have at most twice the most so far,
because the cost of more is not known yet."""
LONGEST_REST = 8
"""Most steps for which a decision against drafting is kept: deciding takes a hundredth of a small
model's step."""


class Choice(NamedTuple):
    """The proposer and the number of draft tokens of one request."""

    proposer: str
    num_tokens: int


class _Group(NamedTuple):
    """Requests of a step with the same adapter version and the same parameters."""

    requests: list[Request]
    tracks: Mapping[str, Track]
    """By proposer that may draft for them."""


@dataclass(slots=True)
class _Step:
    """The next step while its draft tokens are chosen."""

    expected: StepEstimate
    num_sequences: int
    num_free_tokens: int
    verify_seconds: float
    """Of verifying one draft token."""
    token_seconds: dict[str, float] = field(default_factory=dict)
    """Of drafting and verifying one token, by proposer."""
    choices: dict[Request, Choice] = field(default_factory=dict)

    def choose(self, request: Request, proposer: str, num_tokens: int) -> None:
        num_tokens = min(num_tokens, self.num_free_tokens)
        if num_tokens > 0:
            self.choices[request] = Choice(proposer, num_tokens)
            self.num_free_tokens -= num_tokens

    def share_positions(self, name: str, costs: ProposalCosts, num_requests: int) -> None:
        """Divide the proposer's time per draft position among `num_requests`."""
        shared = costs.position_seconds / num_requests
        self.token_seconds[name] = self.verify_seconds + costs.token_seconds + shared


@dataclass(slots=True)
class _Running:
    """The step that runs."""

    seconds: float = 0.0
    """Predicted time; 0 if unknown."""
    proposers: list[str] = field(default_factory=list)
    """Those that were called."""


class Control:
    """Chooses the draft tokens of each step and learns from the results."""

    def __init__(
        self,
        proposers: Sequence[str],
        *,
        max_tokens: int,
        costs: StepCosts,
        watching: Collection[str] = (),
    ) -> None:
        """`proposers`: names, the preferred one first. `costs`: updated by the scheduler.
        `watching`: the proposers that draft for a request only if it was watched."""
        self._proposers = tuple(proposers)
        self._watching = frozenset(watching)
        self._chosen: dict[str, Watch] = {}
        """By the ids of requests that are or were watched for a probe."""
        self._max_tokens = max_tokens
        self._costs = costs
        self._proposal_costs = {name: ProposalCosts() for name in proposers}
        self._overall = {name: Track(max_tokens) for name in proposers}
        self._adapters: OrderedDict[AdapterKey | None, dict[str, Track]] = OrderedDict()
        self._probe_budget = ProbeBudget()
        self._residuals = StepResiduals(proposers)
        self._running = _Running()
        self._step = 0
        self._baseline_steps = BaselineSteps()
        self._most_tokens = FIRST_TOKENS // 2
        self._last_decision = 0
        """The last step for which new drafts were planned."""
        self._num_idle = 0
        """Plans without draft tokens since the last with some."""
        self._rest = range(0)
        """The steps in which the requests of `_resting` get no draft tokens."""
        self._resting: list[Request] = []

    # --- choosing ------------------------------------------------------------------------------

    def choose(self, decodes: Collection[Request], num_free_tokens: int) -> dict[Request, Choice]:
        """Choose draft tokens for the requests for which they pay, the most useful first.

        Until the cost of steps is known, only for requests that ask for draft tokens.
        """
        self._step += 1
        self._running = _Running()
        if self._step in self._rest and list(decodes) == self._resting:
            return {}
        choices = self._decide(decodes, num_free_tokens)
        self._last_decision = self._step
        return choices

    @property
    def rests(self) -> bool:
        """Whether the next step is one of those for which it was decided not to draft."""
        return self._step + 1 in self._rest

    def pass_over(self) -> None:
        """Count a step without draft tokens for which there was no choice."""
        self._step += 1
        self._running = _Running()

    def _decide(self, decodes: Collection[Request], num_free_tokens: int) -> dict[Request, Choice]:
        self._rest = range(0)
        step = self._expect(decodes, num_free_tokens)
        self._running.seconds = step.expected.seconds
        groups = []
        for asked, group in self._group(decodes):
            if asked is None or asked.num_tokens is None:
                groups.append(group)
            else:
                self._plan_requested(asked.num_tokens, group, step)
        if step.expected.seconds > 0:
            self._plan(groups, step)
            self._probe(groups, step)
            self._rest = self._plan_rest(groups, step)
            self._resting = list(decodes)
        return step.choices

    def _plan_rest(self, groups: Iterable[_Group], step: _Step) -> range:
        """The next steps in which no drafts are planned: more, the longer nothing was drafted.

        A probe that is due but was too expensive waits for their end too.
        """
        tracks = [track for group in groups for track in group.tracks.values()]
        if step.choices or any(track.planned for track in tracks):
            self._num_idle = 0
            return range(0)
        self._num_idle += 1
        due = [track.probe_times.next_step for track in tracks]
        due += [track.watch.ready_at for track in tracks if track.watch.is_open]
        later = [number for number in due if number > self._step]
        return range(self._step + 1, min([*later, self._step + min(self._num_idle, LONGEST_REST)]))

    def _expect(self, decodes: Collection[Request], num_free_tokens: int) -> _Step:
        """Predict the step without draft tokens."""
        context = sum([request.num_computed_tokens - request.kv.num_evicted for request in decodes])
        seconds = self._costs.predict(StepShape(0, len(decodes), context))
        least = LEAST_COST * seconds / max(len(decodes), 1)
        verify = max(self._costs.draft_token_seconds(), least)
        # A draft token too many for the graphs would make the step several times as long.
        num_free = self._costs.num_graph_rows_left(len(decodes), max(num_free_tokens, 0))
        step = _Step(StepEstimate(len(decodes), seconds), len(decodes), num_free, verify)
        for name, costs in self._proposal_costs.items():
            step.share_positions(name, costs, max(len(decodes), 1))
        return step

    def _group(self, decodes: Iterable[Request]) -> list[tuple[SpeculationParams | None, _Group]]:
        """Group requests by adapter version and speculation parameters.

        Leaves out requests that switch speculation off or name an unknown proposer. For an adapter
        with tokens of its own, no model proposes: it knows only the base's.
        """
        alike: dict[tuple[AdapterKey | None, SpeculationParams | None], list[Request]]
        alike = defaultdict(list)
        for request in decodes:
            asked = request.submitted.speculation
            if asked is None or not asked.is_off:
                alike[request.adapter, asked].append(request)
        groups = []
        for (line, asked), requests in alike.items():
            tracks = self._use(line)
            if asked is not None and asked.proposer is not None:
                tracks = {name: tracks[name] for name in tracks if name == asked.proposer}
            if requests[0].submitted.vocab_size is not None:
                tracks = {name: tracks[name] for name in tracks if name in COPYING_PROPOSERS}
            for track in tracks.values():
                track.planned = 0
                track.watch.count(self._step, self._step - self._last_decision)
            if tracks:
                groups.append((asked, _Group(requests, tracks)))
        return groups

    def _plan_requested(self, num_tokens: int, group: _Group, step: _Step) -> None:
        """Give each request the draft tokens that its parameters ask for."""
        num_tokens = min(num_tokens, self._max_tokens)
        name = self._best(group, step)
        for request in group.requests:
            step.choose(request, name, num_tokens)
        group.tracks[name].planned = num_tokens
        option, number = self._option(name, group, step), len(group.requests)
        step.expected = step.expected.plus(
            number * sum(option.gains[:num_tokens]),
            number * (option.request_seconds + num_tokens * option.token_seconds),
        )

    def _best(self, group: _Group, step: _Step) -> str:
        """The proposer with the best step rate for this group alone; the first if unknown."""
        names = list(group.tracks)
        if len(names) == 1 or not step.expected.seconds:
            return names[0]
        return max(names, key=lambda name: self._rate(name, group, step))

    def _rate(self, name: str, group: _Group, step: _Step) -> float:
        if not self._may_pay(group.tracks[name], step.token_seconds[name], step):
            return step.expected.rate
        return self._option(name, group, step).best_rate(step.expected, self._call_seconds(name))

    def _call_seconds(self, name: str) -> float:
        """The fixed cost of calling a proposer in a step."""
        return self._proposal_costs[name].call_seconds + self._residuals.of(name)

    def _option(self, name: str, group: _Group, step: _Step) -> DraftOption:
        track = group.tracks[name]
        return DraftOption(
            proposer=name,
            num_requests=len(group.requests),
            gains=track.gains(self._max_tokens),
            token_seconds=track.hit_rate.value * step.token_seconds[name],
            request_seconds=self._proposal_costs[name].request_seconds,
        )

    def _may_pay(self, track: Track, token_seconds: float, step: _Step) -> bool:
        """Quick check: whether some draft token pays if the call itself is free."""
        return max(track.acceptance.probabilities) > step.expected.rate * token_seconds

    def _plan(self, groups: Sequence[_Group], step: _Step) -> None:
        """Choose the draft tokens that maximize the step's rate."""
        candidates = self._candidates(groups, step)
        if not candidates:
            return
        options = [self._option(name, group, step) for name, group in candidates]
        plan = plan_drafts(
            options,
            plain=step.expected,
            num_free_tokens=min(step.num_free_tokens, 2 * self._most_tokens),
            call_seconds={name: self._call_seconds(name) for name in self._proposers},
        )
        num_tokens = sum(map(sum, plan.num_draft_tokens))
        if not num_tokens:
            return
        step.expected = plan.step
        fraction = self._baseline_steps.fraction(step.num_sequences)
        self._most_tokens = max(self._most_tokens, int(fraction * num_tokens))
        planned = zip(options, candidates, plan.num_draft_tokens, strict=True)
        for option, (_, group), num_draft_tokens in sorted(planned, key=lambda it: -it[0].gains[0]):
            track = group.tracks[option.proposer]
            track.planned = max(num_draft_tokens)
            if track.planned:
                track.watch.keep_all(self._step)
            for request, number in zip(group.requests, num_draft_tokens, strict=True):
                step.choose(request, option.proposer, int(fraction * number))

    def _candidates(self, groups: Sequence[_Group], step: _Step) -> list[tuple[str, _Group]]:
        """The groups for which drafting may pay, each with its best proposer.

        The cost per draft position is first divided among all requests of the step, then among
        those that remain.
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
            if not any(self._proposal_costs[name].position_seconds > noise for name in fewer):
                return paying
            num_sharing |= fewer
            for name, number in fewer.items():
                step.share_positions(name, self._proposal_costs[name], number)

    # --- probes -----------------------------------------------------------------------------------

    def _probe(self, groups: Iterable[_Group], step: _Step) -> None:
        """Probe groups that have not been drafted for recently, within the probe budget."""
        self._probe_budget.earn(step.expected.seconds, self._step - self._last_decision)
        for group in groups:
            for name, track in group.tracks.items():
                if not track.planned and track.probe_times.is_due(self._step):
                    self._probe_one(name, group, step)

    def _probe_one(self, name: str, group: _Group, step: _Step) -> None:
        watch = group.tracks[name].watch if name in self._watching else None
        request = self._probed(group, watch)
        left = request.submitted.sampling.max_tokens - request.num_generated_tokens
        if left < 2:
            return
        replaced = step.choices.get(request)
        num_tokens = min(probes.NUM_TOKENS, self._max_tokens)
        num_free = step.num_free_tokens + (replaced.num_tokens if replaced else 0)
        # No room, or not even a token that is certain to be right would pay.
        if num_tokens > num_free or step.token_seconds[name] * step.expected.rate >= 1:
            if watch is not None:
                watch.block(self._step)
            return
        if watch is not None:
            watch.unblock(self._step)
        price = self._probe_seconds(name, num_tokens, step)
        if replaced:
            lost = group.tracks[replaced.proposer].gains(replaced.num_tokens)
            price += sum(lost) / step.expected.rate
        is_paid = watch is not None and watch.is_open
        if not is_paid and not self._probe_budget.spend(price, step.expected.seconds):
            return
        if watch is not None:
            if not watch.may_probe(request.request_id, self._step):
                if not watch.is_open:
                    watch.open(self._step)
                return
            watch.close(self._step)
        step.num_free_tokens = num_free
        step.choose(request, name, num_tokens)
        group.tracks[name].probe_times.begin(self._step)

    def _probed(self, group: _Group, watch: Watch | None) -> Request:
        """The request that is watched, or another one in turn."""
        if watch is not None:
            for request in group.requests:
                if request.request_id == watch.chosen:
                    return request
        return group.requests[self._step % len(group.requests)]

    def _probe_seconds(self, name: str, num_tokens: int, step: _Step) -> float:
        seconds = self._proposal_costs[name].predict([num_tokens]) + self._residuals.of(name)
        return seconds + num_tokens * step.verify_seconds

    # --- watching -------------------------------------------------------------------------------

    def watches(self, request: Request) -> bool:
        """Whether proposers are to see what this step computes of the request."""
        if request.submitted.sampling.max_tokens < LEAST_TOKENS:
            return False
        names = self._watching
        if asked := request.submitted.speculation:
            if asked.is_off:
                return False
            if asked.proposer is not None:
                names &= {asked.proposer}
        if not names or request.submitted.vocab_size is not None:
            return False
        tracks = self._adapters.get(request.adapter)
        if tracks is None or (asked is not None and asked.num_tokens is not None):
            return True
        return any(self._is_watched(request, tracks[name].watch) for name in names)

    def _is_watched(self, request: Request, watch: Watch) -> bool:
        request_id = request.request_id
        if watch.wants_one(self._step) and not request.has_ended:
            watch.choose(request_id, self._step, is_from_start=not request.num_generated_tokens)
            self._chosen[request_id] = watch
        return watch.covers(request_id, self._step)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if watch := self._chosen.pop(request_id, None):
            watch.drop(request_id)

    # --- learning -------------------------------------------------------------------------------

    def observe_proposals(
        self, proposer: str, drafts: Sequence[tuple[Request, int]], seconds: float
    ) -> None:
        """A proposer was called for these requests; `drafts`: the draft length of each."""
        for request, length in drafts:
            own, overall = self._tracks_of(request, proposer)
            if not length and proposer in self._watching and own.watch.is_new(self._step):
                continue  # it was not watched
            for track in (own, overall):
                track.observe_request(self._step, has_draft=length > 0)
        costs, lengths = self._proposal_costs[proposer], [length for _, length in drafts]
        verify_seconds = sum(lengths) * self._costs.draft_token_seconds()
        self._running.seconds += costs.predict(lengths) + verify_seconds
        self._running.proposers.append(proposer)
        costs.observe(lengths, seconds)

    def observe(
        self, request: Request, proposer: str, num_tokens: int, accepted: Collection[int]
    ) -> None:
        """The request's draft was verified; `accepted`: positions of accepted tokens, in the
        proposer's order."""
        for track in self._tracks_of(request, proposer):
            track.observe(self._step, num_tokens, accepted)

    def observe_step(self, seconds: float) -> None:
        """The step took `seconds`, with planning and drafting. Not called for steps with prefill
        and for repeated steps."""
        if self._running.seconds > 0 and self._costs.knows_draft_tokens:
            self._residuals.observe(self._running.proposers, self._running.seconds, seconds)

    def snapshot(self) -> list[SpeculationStats]:
        """Most recently used adapters first, at most MAX_STATS entries."""
        recent = islice(reversed(self._adapters), MAX_STATS // max(len(self._proposers), 1))
        return [stats for key in recent for stats in self.explain(key)]

    def explain(self, key: AdapterKey | None) -> list[SpeculationStats]:
        """The proposers' estimates for one adapter version; None: the base."""
        tracks = self._adapters.get(key, {})
        return [track.stats(key, name) for name, track in tracks.items()]

    def totals(self) -> list[ProposerTotals]:
        """Sums over all adapters since the start."""
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
        """The tracks of the request's adapter and of all adapters."""
        return self._use(request.adapter)[proposer], self._overall[proposer]

    def _use(self, key: AdapterKey | None) -> dict[str, Track]:
        """The tracks of an adapter, which becomes the most recently used."""
        tracks = self._adapters.get(key)
        if tracks is None:
            tracks = {
                name: Track(self._max_tokens, self._overall[name], step=self._step)
                for name in self._proposers
            }
            self._adapters[key] = tracks
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(key)
        return tracks
