"""One request inside the engine: its tokens, its blocks and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..adapters.residency import Lease, Tier
from .messages import GenerationRequest
from .prefix_cache import ROOT_KEY, CacheNamespace


@dataclass(eq=False, slots=True)
class Request:
    """Owned by the scheduler; the runner reads it, nobody else sees it.

    Tokens `[0, num_computed_tokens)` have their keys and values in `block_ids`. A request decodes
    when all but its last token are computed, and prefills otherwise, be it for the first time or
    after a preemption.
    """

    submitted: GenerationRequest
    namespace: CacheNamespace
    seed: int
    arrival_time: float
    adapter_tier: Tier | None
    """Where the adapter was on arrival."""
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    block_ids: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    last_block_key: bytes = ROOT_KEY
    lease: Lease | None = None
    started: bool = False
    adapter_missing_since: float | None = None
    """Since when only its adapter keeps it waiting."""
    adapter_wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = list(self.submitted.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.submitted.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submitted.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose keys and values are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    def forget_progress(self) -> None:
        """Back to nothing computed, as after a preemption."""
        self.num_computed_tokens = 0
        self.block_ids = []
        self.num_published_blocks = 0
        self.last_block_key = ROOT_KEY
        self.lease = None
