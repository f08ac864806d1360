"""From a parsed request to a running generation: which model, which tokens, who pays."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...adapters.residency import Tier
from ...engine.client import EngineClient
from ...engine.errors import ProposerNotServed
from ...engine.messages import GenerationRequest, Pooling, RequestStarted, SpeculationParams
from ...engine.sampling_params import SamplingParams
from ...engine.tokenizer import Tokenizer
from ...platform.adapters import registry
from ...platform.adapters.registry import AdapterRef
from ...platform.keys.principal import Principal
from ...platform.usage import service as ledger
from ...platform.usage.service import Usage
from ..control_plane import ControlPlane
from ..errors import ApiError
from ..metrics import Metrics
from ..request_measures import RequestMeasures
from ..tenant_turns import TenantTurns
from ..threads import WorkerThreads
from .echo import Echo, echo_of
from .generation import Generation, Outcome, SequenceSpec

NUM_TOKENIZERS = 2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the `model` of a request means, from its admission to its end."""

    name: str
    """The pinned name: `tenant/adapter@3`, or the base model's."""
    adapter: AdapterRef | None
    """None is the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that determines one generation."""

    request_id: str
    arrived_at: float
    principal: Principal
    model: ServedModel
    prompts: Sequence[list[int]]
    num_choices: int
    priority: int = 0
    """Among the tenant's own requests: lower ones first."""
    deadline_ms: int | None = None
    """Counted from `arrived_at`, to the last token."""
    speculation: SpeculationParams | None = None
    """None: the engine decides."""
    sampling: SamplingParams
    """Of the first choice; the others differ in their seed."""
    stop: tuple[str, ...]
    continues_prompt: bool
    """Plain completions: the text goes on where the prompt's ends."""
    num_prompt_logprobs: int | None = None
    """Asked of each prompt once, whatever the number of choices."""
    pooling: Pooling | None = None
    """Each prompt's embedding is asked for, and no output."""
    prompt_param: str = "prompt"
    """What the caller knows the prompts by."""
    measures: RequestMeasures = field(default_factory=RequestMeasures)
    """Where its figures are noted for the request's log line and span."""


@dataclass(frozen=True, slots=True)
class Running:
    """A generation that has begun."""

    order: Order
    generation: Generation
    started: RequestStarted


class Inference:
    """Starts generations; one for the server."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        tokenizer: Tokenizer,
        control_plane: ControlPlane,
        metrics: Metrics,
        served_model_name: str,
        adapter_wait_seconds: float,
    ) -> None:
        self.served_model_name = served_model_name
        self.tokenizer = tokenizer
        self._engine = engine
        self._control_plane = control_plane
        self._metrics = metrics
        self._threads = WorkerThreads("tokenizer", NUM_TOKENIZERS)
        self._turns = TenantTurns(self._threads)
        self._adapter_wait_seconds = adapter_wait_seconds

    def close(self) -> None:
        self._threads.close()

    async def resolve(
        self, principal: Principal, model: str, *, request_id: str = ""
    ) -> ServedModel:
        """What `model` means now. The base's name is reserved; nothing falls back to the base.

        Which version of a split alias answers depends on `request_id` alone. Raises a
        PlatformError: unknown, foreign, not ready or of another base.
        """
        if model == self.served_model_name:
            return ServedModel(model, None)
        name = registry.parse_model_name(model)
        adapter = await self._control_plane.read(
            principal.tenant_id,
            lambda session: registry.resolve(
                session,
                name,
                tenant_slug=principal.tenant_slug,
                base_id=self._engine.info.base_id,
                request_id=request_id,
            ),
        )
        return ServedModel(adapter.pinned, adapter)

    async def encode_chat(
        self,
        principal: Principal,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt of a conversation. Raises an EngineError that says what does not fit."""
        return await self._turns.run(
            principal.tenant_id,
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
        )

    async def encode(
        self,
        principal: Principal,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        max_tokens: int = 0,
    ) -> list[list[int]]:
        """Each prompt's token ids; those of the caller's are checked later and taken as they are.

        `truncate`: keep so many of the last ones, -1 as many as have room with `max_tokens`.
        """

        def encode(prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, str):
                return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return prompt

        def encode_all() -> list[list[int]]:
            return list(map(encode, prompts))

        has_text = any(isinstance(prompt, str) for prompt in prompts)
        encoded = (
            await self._turns.run(principal.tenant_id, encode_all) if has_text else encode_all()
        )
        if truncate is None:
            return encoded
        room = max(self._engine.info.max_model_len - max_tokens, 1)
        kept = room if truncate < 0 else truncate
        return [prompt[max(len(prompt) - kept, 0) :] for prompt in encoded]

    async def echo(
        self,
        principal: Principal,
        prompts: Sequence[str | list[int]],
        encoded: Sequence[list[int]],
        *,
        is_cut: bool,
    ) -> list[Echo]:
        """The prompts as answers repeat them. `is_cut`: `encoded` may lack their beginnings."""

        def echo_all() -> list[Echo]:
            return [
                echo_of(
                    self.tokenizer,
                    prompt if isinstance(prompt, str) and not is_cut else None,
                    token_ids,
                )
                for prompt, token_ids in zip(prompts, encoded, strict=True)
            ]

        return await self._turns.run(principal.tenant_id, echo_all)

    async def decode(self, principal: Principal, token_ids: Sequence[int]) -> str:
        """The text of these tokens, special ones too."""
        return await self._turns.run(
            principal.tenant_id, self.tokenizer.decode, token_ids, skip_special_tokens=False
        )

    def room_for_output(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow the prompt. Raises ApiError if none."""
        capacity = self._engine.info.max_model_len
        if len(prompt) >= capacity:
            raise ApiError(
                "context_length_exceeded",
                f"The prompt has {len(prompt)} tokens; with the output it may have {capacity}.",
            )
        return capacity - len(prompt)

    async def start(self, order: Order) -> Running:
        """Submit the order; return once it is scheduled. Raises ApiError or an EngineError."""
        order.measures.model = order.model.name
        self._check_token_ids(order)
        self._check_proposer(order.speculation)
        generation = self._prepare(order)
        try:
            started = await generation.start(
                is_loading=lambda: self._is_loading(order.model),
                patience_seconds=self._adapter_wait_seconds,
            )
        except BaseException:
            await generation.aclose()
            raise
        return Running(order, generation, started)

    def _prepare(self, order: Order) -> Generation:
        specs = [
            SequenceSpec(
                index=position * order.num_choices + choice,
                request=self._sequence_request(order, position, choice),
                is_first_choice=choice == 0,
                stop=order.stop,
                continues_prompt=order.continues_prompt,
            )
            for position in range(len(order.prompts))
            for choice in range(order.num_choices)
        ]

        async def meter(outcome: Outcome) -> None:
            await self._meter(order, outcome)

        return Generation(
            specs,
            engine=self._engine,
            tokenizer=self.tokenizer,
            metrics=self._metrics,
            arrived_at=order.arrived_at,
            measures=order.measures,
            meter=meter,
            deadline_at=(
                None if order.deadline_ms is None else order.arrived_at + order.deadline_ms / 1000
            ),
        )

    async def _meter(self, order: Order, outcome: Outcome) -> None:
        counts = outcome.counts
        usage = Usage(
            request_id=order.request_id,
            adapter=order.model.adapter,
            prompt_tokens=counts.num_prompt_tokens,
            cached_tokens=counts.num_cached_tokens,
            completion_tokens=counts.num_completion_tokens,
            tier=outcome.tier,
            finish_reason=outcome.finish_reason,
        )
        await self._control_plane.write(
            order.principal.tenant_id, lambda session: ledger.record(session, usage)
        )
        self._metrics.observe_usage(
            order.principal.tenant_slug,
            prompt_tokens=counts.num_prompt_tokens,
            completion_tokens=counts.num_completion_tokens,
        )

    def _check_token_ids(self, order: Order) -> None:
        vocab_size = self._engine.info.vocab_size
        for prompt in order.prompts:
            param = order.prompt_param
            if not prompt:
                raise ApiError("invalid_parameter", f"{param}: is empty", param=param)
            if max(prompt) >= vocab_size:
                raise _outside_vocabulary(param, vocab_size)
        if max(order.sampling.logit_bias, default=0) >= vocab_size:
            raise _outside_vocabulary("logit_bias", vocab_size)

    def _check_proposer(self, asked: SpeculationParams | None) -> None:
        served = self._engine.info.proposers
        if asked is not None and asked.proposer is not None and asked.proposer not in served:
            raise ProposerNotServed(asked.proposer, served)

    def _sequence_request(self, order: Order, position: int, choice: int) -> GenerationRequest:
        adapter = order.model.adapter
        is_one_of_many = order.num_choices > 1
        return GenerationRequest(
            request_id=f"{order.request_id}-{position * order.num_choices + choice}",
            tenant_id=order.principal.tenant_id,
            prompt_token_ids=order.prompts[position],
            sampling=_choice_sampling(order.sampling, choice, self.tokenizer.eos_token_ids),
            adapter=adapter.key if adapter else None,
            group_id=f"{order.request_id}-{position}" if is_one_of_many else None,
            speculation=order.speculation,
            priority=order.priority,
            pooling=order.pooling,
            num_prompt_logprobs=order.num_prompt_logprobs if choice == 0 else None,
        )

    def _is_loading(self, model: ServedModel) -> bool:
        stats = self._engine.stats
        if model.adapter is None or stats is None:
            return False
        tiers = {entry.key: entry.tier for entry in stats.adapters}
        return tiers.get(model.adapter.key) is not Tier.DEVICE


def _choice_sampling(
    sampling: SamplingParams, choice: int, eos_token_ids: frozenset[int]
) -> SamplingParams:
    """A choice's own seed, and every token that ends it: some only the tokenizer's files name."""
    eos = () if sampling.ignore_eos else sorted(eos_token_ids)
    return replace(
        sampling,
        seed=_choice_seed(sampling.seed, choice),
        stop_token_ids=(*sampling.stop_token_ids, *eos),
    )


def _choice_seed(seed: int | None, choice: int) -> int | None:
    """The first choice has the caller's seed, so that `n` does not change it."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _outside_vocabulary(param: str, vocab_size: int) -> ApiError:
    message = f"{param}: has token ids outside [0, {vocab_size})"
    return ApiError("invalid_parameter", message, param=param)
