"""What the caller of one request gets, against what is right."""

from __future__ import annotations

from loraplex.engine.errors import (
    AdapterDeleted,
    EngineRestarted,
    NotNow,
    PromptTooLong,
    TenantQueueFull,
)
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import (
    FinishReason,
    GenerationRequest,
    RequestFinished,
    RequestStarted,
    TokensGenerated,
)
from loraplex.engine.process.request_stream import RequestEvent
from simulation.contents import STOP_TOKEN, Contents, next_token
from simulation.engine import RUNTIME_ID
from simulation.ledger import LOAD_ERROR_CODES
from simulation.scenario import Scenario
from simulation.violation import Invariant, require

ALWAYS_EXPLAINED = frozenset(
    {"length", "stop", PromptTooLong.code, NotNow.code, TenantQueueFull.code}
)


class Order:
    """One request as its caller sees it."""

    def __init__(self, submitted: GenerationRequest, scenario: Scenario) -> None:
        self.submitted = submitted
        self.allowed = set(ALWAYS_EXPLAINED)
        """Ends that something explains."""
        sizes, adapter = scenario.adapter_sizes, submitted.adapter
        if adapter is not None and sizes[adapter] > scenario.arena_cells:
            self.allowed |= LOAD_ERROR_CODES
        self.is_over = False
        self.tokens: list[int] = []
        self.num_cached: int | None = None
        self._scenario = scenario

    def allow_deletion(self) -> None:
        self.allowed |= {AdapterDeleted.code, *LOAD_ERROR_CODES}

    def allow_restart(self) -> None:
        self.allowed.add(EngineRestarted.code)

    def take(self, event: RequestEvent, cached: range) -> None:
        """`cached`: how many tokens of its prompt may count as cached, if it starts."""
        name = self.submitted.request_id
        require(not self.is_over, Invariant.ONE_END, f"{name} goes on after its end")
        match event:
            case RequestStarted():
                require(self.num_cached is None, Invariant.BILLED, f"{name} starts twice")
                self.num_cached = event.num_cached_tokens
                require(
                    self.num_cached in cached,
                    Invariant.BILLED,
                    f"{self.num_cached} tokens of {name} are billed as cached, not {cached}",
                )
            case TokensGenerated():
                require(self.num_cached is not None, Invariant.BILLED, f"{name} has not begun")
                self.tokens += event.token_ids
            case RequestFinished():
                self.is_over = True
                self._check_end(event)

    def _check_end(self, end: RequestFinished) -> None:
        name = self.submitted.request_id
        reason = end.error.code if end.error else end.reason.value
        require(reason in self.allowed, Invariant.ONE_END, f"{name} ended with {reason}")
        expected = self._expected()
        is_complete = end.reason in (FinishReason.LENGTH, FinishReason.STOP)
        if not is_complete:
            expected = expected[: len(self.tokens)]
        require(self.tokens == expected, Invariant.AS_PLAIN, f"{name} has other tokens")
        if is_complete:
            num_generated = end.num_generated_tokens
            require(
                num_generated == len(self.tokens),
                Invariant.BILLED,
                f"{num_generated} tokens of {name} are billed, and it got {len(self.tokens)}",
            )

    def _expected(self) -> list[int]:
        """What one engine generates that computes everything itself."""
        submitted = self.submitted
        sampling = submitted.sampling
        longest = len(submitted.prompt_token_ids) + sampling.max_tokens
        has_adapter = submitted.adapter_start is not None
        namespace = CacheNamespace(
            submitted.tenant_id,
            RUNTIME_ID,
            submitted.adapter if has_adapter else None,
            submitted.cache_namespace,
            rotary_start=self._scenario.rotary_contexts.start(longest),
            adapter_start=submitted.adapter_start or 0,
        )
        contents, tokens = Contents(namespace), list(submitted.prompt_token_ids)
        generated: list[int] = []
        while len(generated) < sampling.max_tokens:
            value = contents.up_to(tokens, len(tokens))[-1]
            generated.append(next_token(value, sampling.seed or 0))
            tokens.append(generated[-1])
            if generated[-1] == STOP_TOKEN and not sampling.ignore_eos:
                break
        return generated
