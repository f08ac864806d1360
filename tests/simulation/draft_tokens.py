"""A simulated proposer that knows the output, and is wrong as often as the scenario says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from random import Random

from loraplex.engine.draft import Draft
from loraplex.engine.kv_policy import EvictionMethod
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledSequence

from .contents import VOCABULARY, Contents, next_token
from .scenario import Scenario


class DrawnTokens:
    """In the place of `Speculation`: the scheduler's policy and the loop's proposer in one."""

    def __init__(self, scenario: Scenario, contents: Mapping[str, Contents]) -> None:
        self.counts: Counter[str] = Counter()
        self.wanted: dict[Request, int] = {}
        """What was asked of the scheduler for the step."""
        self.drafting: set[Request] = set()
        """Whose draft tokens the step verifies."""
        self.rests = True
        """See `DraftPolicy`."""
        self._rng = Random(scenario.seed + 2)
        self._resting = Random(scenario.seed + 4)
        self._contents = contents
        self._max_tokens = scenario.max_draft_tokens
        self._error = scenario.draft_error
        self._block_size = scenario.limits.block_size

    def begin_step(self) -> None:
        """The scheduler may ask for draft tokens, or not."""
        self.wanted = {}
        self.rests = not self._max_tokens or self._resting.random() < 0.6

    def plan(self, decodes: Collection[Request], num_free_tokens: int) -> Mapping[Request, int]:
        """See `DraftPolicy`."""
        rng = self._rng
        if self._max_tokens:
            chosen = [request for request in decodes if rng.random() < 0.7 and _may_draft(request)]
            self.wanted = {request: rng.randint(1, self._max_tokens) for request in chosen}
        return self.wanted

    def pass_over(self) -> None:
        """See `DraftPolicy`."""
        self.drafting = set()

    def draft(self, sequences: Sequence[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
        """Give those that were scheduled with draft tokens theirs, at times fewer than there may
        be."""
        drafted = []
        for sequence in sequences:
            num_tokens = sequence.num_draft_tokens
            if num_tokens:
                if self._rng.random() < 0.1:
                    num_tokens = self._rng.randint(0, num_tokens)
                sequence.request.draft = self._propose(sequence.request, num_tokens)
                sequence = sequence.with_draft()
            drafted.append(sequence)
        self._take_note(drafted)
        return tuple(drafted)

    def observe_features(self, request: Request, start: int, features: object) -> None:
        raise AssertionError("the steps have none")

    def observe(self, request: Request, accepted: Sequence[int], hidden_state: object) -> None:
        if num_tokens := len(request.draft):
            request.num_draft_tokens += num_tokens
            outcome = "partly" if accepted else "not"
            self.counts[f"drafts_{outcome if len(accepted) < num_tokens else 'wholly'}"] += 1

    def _propose(self, request: Request, num_tokens: int) -> Draft:
        contents = self._contents[request.request_id]
        value = contents.up_to(request.token_ids, len(request.token_ids))[-1]
        tokens: list[int] = []
        for _ in range(num_tokens):
            token = next_token(value, request.seed)
            if self._rng.random() < self._error:
                token = self._rng.randrange(VOCABULARY)
            tokens.append(token)
            value = contents.behind(tokens)[-1]
        return Draft(tuple(tokens))

    def _take_note(self, sequences: Sequence[ScheduledSequence]) -> None:
        self.drafting = {entry.request for entry in sequences if entry.num_draft_tokens}
        for request, num_tokens, num_draft_tokens, *_ in sequences:
            if num_draft_tokens:
                place = request.num_computed_tokens - request.kv.num_evicted
                first = place // self._block_size
                last = (place + num_tokens - 1) // self._block_size
                self.counts["drafts_over_borders"] += first < last


def _may_draft(request: Request) -> bool:
    """As `RequestLifecycle` decides."""
    policy = request.submitted.kv_policy
    return policy is None or policy.method is not EvictionMethod.H2O
