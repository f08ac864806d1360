"""The engine loop's interface to speculation: proposals, and learning from their results."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from ...adapters.identity import AdapterKey
from ..config import EngineConfig
from ..draft import NO_DRAFT, Draft
from ..errors import ProposerNotServed, RankLost
from ..execution.runner import ModelRunner
from ..messages import ProposerTotals, SpeculationParams, SpeculationStats
from ..model.base_model import BaseModel
from ..model.layer_features import LayerFeatures
from ..request import Request
from ..scheduling.batch import ScheduledSequence
from ..scheduling.step_costs import StepCosts
from .acceptors import Acceptor, make_acceptor
from .control import Choice, Control
from .proposer import DraftRequest, FeatureProposer, OutputProposer, Proposer
from .proposers import open_proposers

logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Speculation:
    """Owns the proposers; a scheduler's DraftPolicy. Without proposers it does nothing."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        *,
        acceptor: Acceptor,
        control: Control,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.acceptor = acceptor
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._feature_proposers = [
            proposer for proposer in proposers if isinstance(proposer, FeatureProposer)
        ]
        self._output_proposers = [
            proposer for proposer in proposers if isinstance(proposer, OutputProposer)
        ]
        self._control = control
        self._vocab_size = vocab_size
        self._clock = clock
        self._choices: dict[str, Choice] = {}
        """By request id, for the last planned step."""
        self._planning_seconds = 0.0

    @property
    def needs_hidden_states(self) -> bool:
        return any(proposer.needs_hidden_states for proposer in self._proposers.values())

    @property
    def features(self) -> LayerFeatures | None:
        """What steps have to give of the hidden states between layers."""
        return next((proposer.features for proposer in self._feature_proposers), None)

    def check(self, asked: SpeculationParams | None) -> None:
        """Raises ProposerNotServed."""
        if asked and asked.proposer is not None and asked.proposer not in self._proposers:
            raise ProposerNotServed(asked.proposer, self._proposers)

    def plan(self, decodes: Collection[Request], num_free_tokens: int) -> Mapping[Request, int]:
        """See `policy.DraftPolicy`."""
        if not self._proposers:
            return {}
        start = self._clock()
        choices = self._control.choose(decodes, num_free_tokens)
        self._planning_seconds = self._clock() - start
        self._choices = {request.request_id: choice for request, choice in choices.items()}
        return {request: choice.num_tokens for request, choice in choices.items()}

    @property
    def rests(self) -> bool:
        """See `policy.DraftPolicy`."""
        return not self._proposers or self._control.rests

    def pass_over(self) -> None:
        """See `policy.DraftPolicy`."""
        if self._proposers:
            self._control.pass_over()

    def draft(self, sequences: tuple[ScheduledSequence, ...]) -> tuple[ScheduledSequence, ...]:
        """Attach drafts to the requests that were scheduled with draft tokens.

        Returns the sequences with their drafts, in the order that a batch needs.
        """
        wanted: dict[str, list[DraftRequest]] = defaultdict(list)
        for request, _, num_draft_tokens, *_ in sequences:
            if num_draft_tokens:
                choice = self._choices[request.request_id]
                wanted[choice.proposer].append(DraftRequest(request, num_draft_tokens))
        if not wanted:
            return sequences
        for name, entries in wanted.items():
            self._propose(name, entries)
        drafted = [
            sequence.with_draft() if sequence.num_draft_tokens else sequence
            for sequence in sequences
        ]
        return tuple(sorted(drafted, key=_place))

    def observe(
        self, request: Request, accepted: Sequence[int], hidden_state: Tensor | None
    ) -> None:
        """The request's tokens have grown by these of its draft, and one more."""
        draft = request.draft
        if len(draft):
            request.num_draft_tokens += len(draft)
            request.num_accepted_tokens += len(accepted)
            proposer_name = self._choices[request.request_id].proposer
            self._control.observe(request, proposer_name, len(draft), accepted)
        for proposer in self._proposers.values():
            seen = hidden_state if proposer.needs_hidden_states else None
            _attempt(proposer, proposer.observe, request, seen)

    def watches(self, request: Request) -> bool:
        """Whether a proposer is to see what this step computes of the request."""
        return self._control.watches(request)

    def observe_features(self, request: Request, start: int, features: Tensor) -> None:
        """See `FeatureProposer.observe_features`. Steps may give those of requests that are not
        watched."""
        if request.has_ended or not self.watches(request):
            return
        for proposer in self._feature_proposers:
            _attempt(proposer, proposer.observe_features, request, start, features)

    def observe_step(self, seconds: float) -> None:
        """The last planned step took this long, including its drafts, and computed no prompts."""
        if self._proposers:
            self._control.observe_step(self._planning_seconds + seconds)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._choices.pop(request_id, None)
        self._control.forget(request_id)
        for proposer in self._proposers.values():
            _attempt(proposer, proposer.forget, request_id)

    def remember(self, request: Request) -> None:
        """The output of this request of an adapter is complete. Later requests of the same adapter
        version may be drafted from it."""
        for proposer in self._output_proposers:
            _attempt(proposer, proposer.remember, request, self._clock())

    def forget_outputs(self, adapter: AdapterKey) -> None:
        """Draft nothing from outputs of an adapter version or its compositions any more, those of
        open requests included."""
        for proposer in self._output_proposers:
            proposer.forget_outputs(adapter, self._clock())

    def drop_old_outputs(self) -> None:
        """Call it every few seconds."""
        for proposer in self._output_proposers:
            _attempt(proposer, proposer.drop_old_outputs, self._clock())

    def snapshot(self) -> list[SpeculationStats]:
        return self._control.snapshot()

    def totals(self) -> list[ProposerTotals]:
        return self._control.totals()

    def explain(self, key: AdapterKey | None) -> list[SpeculationStats]:
        """The statistics of the proposers for one adapter version; None: the base."""
        return self._control.explain(key)

    def _propose(self, name: str, wanted: Sequence[DraftRequest]) -> None:
        start = self._clock()
        proposer = self._proposers[name]
        drafts = _attempt(proposer, self._ask, proposer, wanted) or [NO_DRAFT] * len(wanted)
        for (request, _), draft in zip(wanted, drafts, strict=True):
            request.draft = draft
        lengths = [(request, len(request.draft)) for request, _ in wanted]
        self._control.observe_proposals(name, lengths, self._clock() - start)

    def _ask(self, proposer: Proposer, wanted: Sequence[DraftRequest]) -> list[Draft]:
        return [
            self._checked(request, draft, num_tokens)
            for (request, num_tokens), draft in zip(wanted, proposer.propose(wanted), strict=True)
        ]

    def _checked(self, request: Request, draft: Draft, num_tokens: int) -> Draft:
        """The part of a draft that may be computed: within the room, up to the first invalid token,
        and as far as the request's grammar allows.

        Whether a draft token is removed must not depend on its value, or rejection sampling would
        sample from another distribution; therefore proposers with logits sample under the grammar.
        """
        vocab_size = request.submitted.vocab_size or self._vocab_size
        draft = draft.only(range(_num_computable(draft, num_tokens, vocab_size)))
        return draft if request.matcher is None else request.matcher.cut(draft)


def _num_computable(draft: Draft, num_tokens: int, vocab_size: int) -> int:
    for index, token in enumerate(draft.token_ids[:num_tokens]):
        if not 0 <= token < vocab_size:
            return index
    return min(len(draft), num_tokens)


def _attempt(
    proposer: Proposer,
    call: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result | None:
    """The result of the call; None if it fails: requests continue whatever a proposer does. Raises
    RankLost."""
    try:
        return call(*args, **kwargs)
    except RankLost:  # no rank can go on
        raise
    except Exception:  # without its draft tokens a request's output is the same
        logger.exception("proposer %s failed", proposer.name)
        return None


def _place(sequence: ScheduledSequence) -> int:
    """Sequences of one token first, then those with drafts, then prompts."""
    if sequence.num_draft_tokens:
        return 1
    return 0 if sequence.is_decode else 2


def open_speculation(
    config: EngineConfig,
    *,
    base: BaseModel,
    runner: ModelRunner,
    costs: StepCosts,
    clock: Callable[[], float],
    loaded: Iterable[Proposer] = (),
) -> Speculation:
    """The speculation that the configuration describes; `loaded`: see `open_proposers`, whose
    errors it raises. A base with states, which cannot take back draft tokens, has none."""
    proposers: list[Proposer] = []
    if not base.has_states:
        proposers = open_proposers(config, base=base, runner=runner, loaded=loaded)
    names = [proposer.name for proposer in proposers]
    speculation = Speculation(
        proposers,
        acceptor=make_acceptor(config.acceptance),
        control=Control(
            names,
            max_tokens=config.max_draft_tokens,
            costs=costs,
            watching=[each.name for each in proposers if isinstance(each, FeatureProposer)],
        ),
        vocab_size=base.vocab_size,
        clock=clock,
    )
    runner.keeps_hidden_states = speculation.needs_hidden_states
    runner.features = speculation.features
    runner.watches = speculation.watches
    return speculation
