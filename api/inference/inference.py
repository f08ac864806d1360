"""From a parsed request to a running generation: which model, which tokens, who pays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import structlog

from ...adapters.manager import Tier
from ...engine.errors import GrammarNotServed, InvalidGrammar, ProposerNotServed
from ...engine.grammars.spec import GrammarSpec
from ...engine.messages import GenerationRequest, Pooling, RequestStarted, SpeculationParams
from ...engine.process.client import EngineClient
from ...engine.sampling_params import SamplingParams
from ...engine.text.tokenizer import Tokenizer
from ...platform.adapters import registry
from ...platform.adapters.registry import AdapterRef, Meaning, ModelName
from ...platform.errors import DatabaseBusy, DatabaseUnavailable, ModelNotFound, PlatformError
from ...platform.keys.principal import Principal
from ...platform.overview.figures import FigureSums
from ...platform.quotas.limits import MAX_COUNT
from ...platform.quotas.service import Demand
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from ..control_plane.tenant_turns import TenantTurns
from ..telemetry.metrics import Metrics
from ..telemetry.request_measures import RequestMeasures
from ..tools.answer_plan import AnswerPlan, plan_answer
from ..tools.chat_prompt import ChatPrompts
from ..tools.conversation import ChatMessage
from ..tools.tool import Tool, ToolUse
from ..tools.tool_format import ToolFormatName
from .admission import Admission
from .echo import Echo, echo_of
from .generation import Generation, Outcome, SequenceSpec
from .grammar_checks import GrammarChecks
from .metering import Account, Metering
from .seen_adapters import SeenAdapters

log = structlog.get_logger(__name__)

NUM_TOKENIZERS = 4
"""Threads. Two tenants whose prompts take long leave one to the others."""
MAX_TOKENIZER_CALLS = 1024
"""Of one tenant."""
SHORT_PROMPT = 512
"""Characters."""


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
    visible_token_ids: Collection[int] = ()
    """Special tokens that are part of the text: the markers of calls."""
    num_prompt_logprobs: int | None = None
    """Asked of each prompt once, whatever the number of choices."""
    pooling: Pooling | None = None
    """Each prompt's embedding is asked for, and no output."""
    grammar_param: str = "structured_outputs"
    """What the caller knows the grammar of the answer by."""
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


class OpenRequest(NamedTuple):
    """A generation that was admitted and has not ended."""

    order: Order
    generation: Generation


class Inference:
    """Starts generations; one for the server."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        tokenizer: Tokenizer,
        control_plane: ControlPlane,
        metering: Metering,
        seen_adapters: SeenAdapters,
        admission: Admission,
        metrics: Metrics,
        served_model_name: str,
        adapter_wait_seconds: float,
        tool_format: ToolFormatName | None = None,
        tenant_figures: Callable[[str], FigureSums] = lambda tenant_id: FigureSums(),
    ) -> None:
        """`tenant_figures`: to which a tenant's tokens are added as they come."""
        self._grammars = GrammarChecks(tokenizer, lambda: engine.info.vocab_size)
        self.served_model_name = served_model_name
        self.tokenizer = tokenizer
        self.chat_prompts = ChatPrompts(tokenizer, tool_format)
        self._engine = engine
        self._control_plane = control_plane
        self._metering = metering
        self._seen_adapters = seen_adapters
        self._admission = admission
        self._metrics = metrics
        self._tenant_figures = tenant_figures
        self._turns = TenantTurns("tokenizer", NUM_TOKENIZERS, max_calls=MAX_TOKENIZER_CALLS)
        self._adapter_wait_seconds = adapter_wait_seconds
        self._open: dict[str, OpenRequest] = {}

    async def aclose(self) -> None:
        self._turns.close()
        await self._grammars.aclose()

    def find_open(self, request_id: str) -> OpenRequest | None:
        """The request of this id that this server is generating for."""
        return self._open.get(request_id)

    async def resolve(
        self, principal: Principal, model: str, *, request_id: str = ""
    ) -> ServedModel:
        """What `model` means now. The base's name is reserved; nothing falls back to the base.

        Which version of a split alias answers depends on `request_id` alone. A name means what it
        meant up to three seconds ago, unless this server has changed something since, and while
        the database is away what it meant last. Raises a PlatformError: unknown, foreign, beyond
        the key's restriction, not ready or of another base.
        """
        if model == self.served_model_name:
            if not principal.may_use(None):
                raise ModelNotFound(model)
            return ServedModel(model, None)
        name = registry.parse_model_name(model)
        if not principal.may_use(name.adapter):
            raise ModelNotFound(model)
        meaning = self._seen_adapters.fresh(principal.tenant_id, model)
        if meaning is None:
            meaning = await self._look_up(principal, name)
        adapter = meaning.of(request_id, base_id=self._engine.info.base_id)
        return ServedModel(adapter.pinned, adapter)

    async def _look_up(self, principal: Principal, name: ModelName) -> Meaning:
        tenant_id = principal.tenant_id
        ticket = self._seen_adapters.begin(tenant_id)
        try:
            meaning = await self._control_plane.read(
                tenant_id,
                lambda session: registry.resolve(session, name, tenant_slug=principal.tenant_slug),
            )
        except DatabaseUnavailable:
            return self._seen_adapters.recall(tenant_id, name.text)
        except PlatformError:
            self._seen_adapters.forget(tenant_id, name.text)
            raise
        if meaning.is_ready:
            self._seen_adapters.note(tenant_id, meaning, ticket)
        else:
            self._seen_adapters.forget(tenant_id, name.text)
        return meaning

    async def encode_chat(
        self,
        principal: Principal,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        is_bounded: bool = True,
    ) -> list[int]:
        """The prompt of a conversation. Raises an EngineError that says what does not fit.

        `is_bounded`: what is certainly longer than the model's context is not tokenized.
        """
        return await self._turns.run(
            principal.tenant_id,
            self.chat_prompts.encode,
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            max_tokens=self._engine.info.max_model_len if is_bounded else None,
        )

    def plan_answer(
        self,
        use: ToolUse | None,
        *,
        form_grammar: GrammarSpec | None,
        answer_schema: Mapping[str, Any] | None = None,
    ) -> AnswerPlan:
        """How an answer is kept to its request's tools and form; see `plan_answer`."""
        return plan_answer(
            use,
            lambda: self.chat_prompts.tool_format,
            self.tokenizer,
            form_grammar=form_grammar,
            answer_schema=answer_schema,
        )

    async def encode(
        self,
        principal: Principal,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        truncate: int | None = None,
        max_tokens: int = 0,
        is_bounded: bool = True,
    ) -> list[list[int]]:
        """Each prompt's token ids; those of the caller's are checked later and taken as they are.

        `truncate`: keep so many of the last ones, -1 as many as have room with `max_tokens`.
        `is_bounded`: as of `encode_chat`, for prompts that are not cut.
        """
        capacity = self._engine.info.max_model_len
        bound = capacity if is_bounded and truncate is None else None

        def encode(prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, str):
                return self.tokenizer.encode(
                    prompt, add_special_tokens=add_special_tokens, max_tokens=bound
                )
            return prompt

        def encode_all() -> list[list[int]]:
            return list(map(encode, prompts))

        encoded = (
            encode_all()
            if _is_encoded_at_once(prompts)
            else await self._turns.run(principal.tenant_id, encode_all)
        )
        if truncate is None:
            return encoded
        room = max(capacity - max_tokens, 1)
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
        """Submit the order if the tenant's limits let it pass; return once it is scheduled.

        Raises ApiError, an EngineError or a LimitReached.
        """
        order.measures.model = order.model.name
        if order.model.adapter is not None:
            order.measures.adapter_name = order.model.adapter.name
            order.measures.adapter_version = order.model.adapter.version
        self._check_token_ids(order)
        self._check_proposer(order.speculation)
        await self._check_grammar(order)
        generation = await self._admit(order)
        try:
            started = await generation.start(
                is_loading=lambda: self._is_loading(order.model),
                patience_seconds=self._adapter_wait_seconds,
            )
        except BaseException:
            await generation.aclose()
            raise
        return Running(order, generation, started)

    async def _admit(self, order: Order) -> Generation:
        """Open the order's account and let its tenant's limits decide. Raises a LimitReached.

        A tenant that nothing limited when its key was looked up is not asked for: its first limit
        may be seen as late as a key's revocation.
        While the database is away there is nothing to ask: limits rest, what is used counts later.
        One that is only held by others for too long does not let the request past its limits.
        """
        account = self._open_account(order)
        try:
            specs = self._sequences(order, account.slots)
            if order.principal.is_limited:
                await self._admission.admit(
                    order.principal.tenant_id, _demand(order), order.measures
                )
        except BaseException as exc:
            if not isinstance(exc, DatabaseUnavailable) or isinstance(exc, DatabaseBusy):
                self._metering.discard(account)
                raise
            log.warning("admitted_without_limits", request_id=order.request_id)
        return self._prepare(order, specs, account)

    def _sequences(self, order: Order, slots: Sequence[int]) -> list[SequenceSpec]:
        """`slots`: of the journal, one for each."""
        return [
            SequenceSpec(
                index=index,
                request=self._sequence_request(order, index, slot),
                is_first_choice=index % order.num_choices == 0,
                stop=order.stop,
                continues_prompt=order.continues_prompt,
                visible_token_ids=order.visible_token_ids,
            )
            for index, slot in enumerate(slots)
        ]

    def _prepare(self, order: Order, specs: Sequence[SequenceSpec], account: Account) -> Generation:
        async def meter(outcome: Outcome) -> None:
            self._open.pop(order.request_id, None)
            await self._metering.settle(account, outcome)

        generation = Generation(
            specs,
            engine=self._engine,
            tokenizer=self.tokenizer,
            metrics=self._metrics,
            arrived_at=order.arrived_at,
            measures=order.measures,
            meter=meter,
            figures=partial(self._tenant_figures, order.principal.tenant_id),
            deadline_at=(
                None if order.deadline_ms is None else order.arrived_at + order.deadline_ms / 1000
            ),
        )
        self._open[order.request_id] = OpenRequest(order, generation)
        return generation

    def _open_account(self, order: Order) -> Account:
        indices = range(len(order.prompts) * order.num_choices)
        return self._metering.open(
            order.request_id,
            order.principal,
            order.model.adapter,
            sequence_ids=[_sequence_id(order, index) for index in indices],
            counts_prompt=[index % order.num_choices == 0 for index in indices],
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

    async def _check_grammar(self, order: Order) -> None:
        grammar = order.sampling.grammar
        if grammar is None:
            return
        if not self._engine.info.serves_grammars:
            raise GrammarNotServed
        try:
            await self._grammars.check(order.principal.tenant_id, grammar)
        except InvalidGrammar as exc:
            message = f"{order.grammar_param}: {exc}"
            raise ApiError(exc.code, message, param=order.grammar_param) from exc

    def _sequence_request(self, order: Order, index: int, slot: int) -> GenerationRequest:
        position, choice = divmod(index, order.num_choices)
        adapter = order.model.adapter
        is_one_of_many = order.num_choices > 1
        return GenerationRequest(
            request_id=_sequence_id(order, index),
            tenant_id=order.principal.tenant_id,
            prompt_token_ids=order.prompts[position],
            sampling=_choice_sampling(order.sampling, choice, self.tokenizer.eos_token_ids),
            adapter=adapter.key if adapter else None,
            group_id=f"{order.request_id}-{position}" if is_one_of_many else None,
            speculation=order.speculation,
            priority=order.priority,
            tenant_weight=order.principal.tenant_weight,
            pooling=order.pooling,
            num_prompt_logprobs=order.num_prompt_logprobs if choice == 0 else None,
            journal_slot=slot,
        )

    def _is_loading(self, model: ServedModel) -> bool:
        stats = self._engine.stats
        if model.adapter is None or stats is None:
            return False
        tiers = {entry.key: entry.tier for entry in stats.adapters}
        return tiers.get(model.adapter.key) is not Tier.DEVICE


def _is_encoded_at_once(prompts: Sequence[str | list[int]]) -> bool:
    """It takes less than handing it to a thread does."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return not texts or (len(texts) == 1 and len(texts[0]) <= SHORT_PROMPT)


def _sequence_id(order: Order, index: int) -> str:
    return f"{order.request_id}-{index}"


def _demand(order: Order) -> Demand:
    num_sequences = len(order.prompts) * order.num_choices
    return Demand(
        request_id=order.request_id,
        key_id=order.principal.key_id,
        adapter=order.model.adapter,
        input_tokens=sum(map(len, order.prompts)),
        output_tokens=min(order.sampling.max_tokens * num_sequences, MAX_COUNT),
    )


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
