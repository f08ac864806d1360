"""One request in the engine: its tokens, blocks and progress."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..adapters.identity import AdapterKey
from ..adapters.manager import Lease, Tier
from .draft import NO_DRAFT, Draft
from .grammars.matcher import Matcher
from .kv.prefix_cache import CacheNamespace
from .kv.sequence_blocks import SequenceBlocks
from .messages import NO_TARGETS, GenerationRequest, LatencyTargets, Pooling
from .token_counts import TokenCounts

MAX_DUE_SECONDS: Final = 30.0

NEVER: Final = sys.maxsize
"""A position that no token has."""


@dataclass(eq=False, slots=True)
class Request:
    """A request. The scheduler owns it, the runner only reads it, and no other component sees it.

    Tokens `[0, num_computed_tokens)` have their keys and values in `kv`. A request decodes when all
    but its last token are computed, and prefills otherwise, for the first time or after a
    preemption.
    """

    submitted: GenerationRequest
    namespace: CacheNamespace
    seed: int
    arrival_time: float
    adapter_tier: Tier | None
    """The adapter's tier at arrival."""
    eos_token_ids: frozenset[int] = frozenset()
    """The base's end-of-sequence tokens."""

    request_id: str = field(init=False)
    tenant_id: str = field(init=False)
    tenant_weight: float = field(init=False)
    adapter: AdapterKey | None = field(init=False)
    """None: the base. Requests of one tenant and adapter form a queue."""
    adapter_start: int = field(init=False)
    """The position of the first token that the adapter acts on; `NEVER`: on none."""
    priority: int = field(init=False)
    is_background: bool = field(init=False)
    deadline: float | None = field(init=False)
    targets: LatencyTargets = NO_TARGETS
    """Its own and, where it has none, the engine's, by `expect`."""
    due_time: float = math.inf
    """When its first token is due, by `expect`: the order within its queue. A TTFT target of
    more than `MAX_DUE_SECONDS`, or none, counts as that, so that nobody is passed for ever."""
    late_at: float | None = None
    """When it has to begin at the latest to meet its TTFT target, by `Scheduler.add`; None: it has
    none."""
    is_late: bool = False
    """It had not begun at `late_at`."""
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    """Of prompt and output."""
    kv: SequenceBlocks = field(init=False)
    """Given by `Scheduler.add`."""
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    end_token_ids: frozenset[int] = field(init=False)
    """The tokens that end its output; its grammar adds its own."""
    unread: range = field(init=False)
    """The prompt positions that are still to be read."""
    has_penalties: bool = field(init=False)
    limits_tokens: bool = field(init=False)
    """Whether sampling needs the counts of its tokens."""
    reads_logits: bool = field(init=False)
    """Whether reading the prompt needs logits."""
    pooled: Any = None
    """The sum of the hidden states read so far."""

    attention_mass: Any = None
    """Of one whose cache is compacted: by layer the attention that its cached tokens received."""

    num_computed_tokens: int = 0
    """Those of a step in flight included."""
    num_pending_tokens: int = 0
    """Tokens that steps in flight sample for it and that another step will compute: they follow
    `token_ids`."""
    last_step: int = 0
    """The number of the last step that was launched with it; steps are read in their order."""
    has_ended: bool = False
    step_seconds: float = 0.0
    """Its share of the steps that computed it, by `StepCosts.charge`."""
    loaded_bytes: int = 0
    """Of its adapter, copied to the device by loads of which it was the first user."""
    fetched_bytes: int = 0
    """The part of them that was read from the object store."""
    is_settled: bool = False
    """Its end was announced with what it had used: nothing is charged to it any more."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first admission found computed: in the prefix cache or by its group.
    """
    num_charged_tokens: int = 0
    """Prompt tokens that were charged to its tenant; recomputed tokens are not charged again."""
    num_preemptions: int = 0
    draft: Draft = NO_DRAFT
    """The draft tokens that the running step verifies; empty between steps."""
    num_draft_tokens: int = 0
    """Drafted and verified so far."""
    num_accepted_tokens: int = 0
    """The accepted ones of these."""
    matcher: Matcher | None = None
    """The state of the output's grammar, if it has one."""
    token_counts: TokenCounts | None = None
    """Of a request with penalties; see `current_counts`."""
    lease: Lease | None = None
    started: bool = False
    num_lone_steps: int = 0
    """Steps still to be run apart from all others; see `batch.parts_of`."""
    adapter_missing_since: float | None = None
    """Since when only its adapter keeps it waiting."""
    adapter_wait_seconds: float = 0.0
    prefix_wait_seconds: float = 0.0
    """From its arrival until it had the prefix that another replica has computed."""

    def __post_init__(self) -> None:
        submitted = self.submitted
        self.request_id = submitted.request_id
        self.tenant_id = submitted.tenant_id
        self.tenant_weight = submitted.tenant_weight
        self.adapter = submitted.adapter
        start = submitted.adapter_start
        self.adapter_start = NEVER if start is None else start
        self.priority = submitted.priority
        self.is_background = submitted.is_background
        self.num_lone_steps = submitted.num_lone_steps
        self.deadline = None
        if submitted.deadline_seconds is not None:
            self.deadline = self.arrival_time + submitted.deadline_seconds
        self.num_prompt_tokens = len(submitted.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + submitted.sampling.max_tokens
        self.token_ids = list(submitted.prompt_token_ids)
        eos = self.eos_token_ids.union(submitted.own_end_token_ids)
        if submitted.sampling.ignore_eos:
            eos = frozenset()
        self.end_token_ids = eos.union(submitted.sampling.stop_token_ids)
        self.has_penalties = submitted.sampling.has_penalties
        self.limits_tokens = submitted.sampling.limits_tokens
        self.reads_logits = submitted.num_prompt_logprobs is not None
        self.unread = _positions_to_read(submitted)

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens, from the first, that may have been computed for others: not those to be read, nor
        those whose attention decides what is evicted."""
        num_tokens = self.unread.start if self.unread else len(self.token_ids)
        if self.kv.eviction:
            return min(num_tokens, self.kv.eviction.num_reusable_tokens)
        return num_tokens

    def expect(self, targets: LatencyTargets) -> None:
        """Set what is expected of its latencies."""
        ttft = targets.ttft_seconds
        self.targets = targets
        self.due_time = self.arrival_time + min(
            MAX_DUE_SECONDS if ttft is None else ttft, MAX_DUE_SECONDS
        )

    def current_counts(self) -> TokenCounts:
        """The counts of all its tokens."""
        if self.token_counts is None:
            self.token_counts = TokenCounts(self.submitted.prompt_token_ids)
        self.token_counts.follow(self.token_ids)
        return self.token_counts

    def forbidden_tokens(self, draft_tokens: Sequence[int]) -> list[int]:
        """The tokens that may not follow `token_ids` and these: those that end it too early or
        complete a bad word."""
        sampling = self.submitted.sampling
        num_known = max(map(len, sampling.bad_words), default=0)
        start = max(self.num_prompt_tokens, len(self.token_ids) - num_known)
        tail = [*self.token_ids[start:], *draft_tokens]
        forbidden = [
            last
            for *before, last in sampling.bad_words
            if not before or tail[-len(before) :] == before
        ]
        if self.num_generated_tokens + len(draft_tokens) < sampling.min_tokens:
            forbidden += sorted(self.end_token_ids)
        return forbidden

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """The number of known and pending tokens whose keys and values are not computed yet."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens


def _positions_to_read(submitted: GenerationRequest) -> range:
    length = len(submitted.prompt_token_ids)
    if submitted.num_prompt_logprobs is not None:
        return range(length - 1)  # each position predicts the next token
    match submitted.pooling:
        case Pooling.MEAN:
            return range(length)
        case Pooling.LAST | Pooling.CLASSIFY:
            return range(length - 1, length)
        case None:
            return range(0)
