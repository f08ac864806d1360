"""From a parsed request to a running generation: which model, which tokens, who pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog

from ...adapters.manager import Tier
from ...engine.errors import (
    EndlessNotServed,
    GrammarNotServed,
    InvalidGrammar,
    KvPolicyNotServed,
    NotAClassifier,
    ProposerNotServed,
)
from ...engine.generation_defaults import GenerationDefaults
from ...engine.messages import Pooling, RequestStarted
from ...engine.process.engine import Engine
from ...engine.text.tokenizer import Tokenizer
from ...platform.errors import DatabaseBusy, DatabaseUnavailable
from ...platform.overview.figures import FigureSums
from ...platform.quotas.limits import MAX_COUNT
from ...platform.quotas.service import Demand
from ..contract.errors import ApiError
from ..control_plane.control_plane import ControlPlane
from ..samples.sample_log import SampleLog
from ..telemetry.metrics import Metrics
from ..telemetry.vllm_metrics import AskedAdapters
from ..tools.reasoning_format import ReasoningParser
from ..tools.tool_format import ToolFormatName
from .admission import Admission
from .generation import Generation, Outcome, SequenceSpec
from .grammar_checks import GrammarChecks
from .live_answers import LiveAnswer, LiveAnswers, rival_of, shadow_of
from .metering import Account, Metering
from .objective import objective_of
from .order import Order
from .prompts import Prompts
from .seen_adapters import SeenAdapters
from .sequence_times import ABORTED
from .sequences import sequences_of
from .served_models import ServedModel, ServedModels
from .version_tokenizers import VersionTokenizers

log = structlog.get_logger(__name__)


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
    """Starts generations; one for the server.

    A route resolves its model with `models`, makes its tokens with `prompts`, and has its order
    started.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        version_tokenizers: VersionTokenizers,
        control_plane: ControlPlane,
        metering: Metering,
        seen_adapters: SeenAdapters,
        admission: Admission,
        metrics: Metrics,
        live_answers: LiveAnswers,
        served_model_name: str,
        adapter_wait_seconds: float,
        tool_format: ToolFormatName | None = None,
        reasoning_parser: ReasoningParser | None = None,
        tenant_figures: Callable[[str], FigureSums] = lambda tenant_id: FigureSums(),
        samples: SampleLog,
    ) -> None:
        """`tenant_figures`: to which a tenant's tokens are added as they come."""
        self.served_model_name = served_model_name
        self.tokenizer = tokenizer
        self.models = ServedModels(
            base_name=served_model_name,
            engine=engine,
            control_plane=control_plane,
            seen_adapters=seen_adapters,
            tokenizers=version_tokenizers,
        )
        self.prompts = Prompts(tokenizer, engine, tool_format, reasoning_parser)
        self.samples = samples
        self._grammars = GrammarChecks(tokenizer, lambda: engine.info.vocab_size)
        self._engine = engine
        self._metering = metering
        self._admission = admission
        self._metrics = metrics
        self._live_answers = live_answers
        self._tenant_figures = tenant_figures
        self._adapter_wait_seconds = adapter_wait_seconds
        self._open: dict[str, OpenRequest] = {}

    async def aclose(self) -> None:
        self.prompts.close()
        await self._grammars.aclose()

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """Of requests that leave sampling parameters out."""
        return self._engine.info.generation_defaults

    def tokenizer_of(self, model: ServedModel) -> Tokenizer:
        """The tokenizer of a model's prompts and answers."""
        return model.own_tokenizer or self.tokenizer

    def vocab_size_of(self, model: ServedModel | None) -> int:
        """The number of a model's tokens; None: the base's."""
        own = model.adapter.vocab_size if model and model.adapter else None
        return own or self._engine.info.vocab_size

    def find_open(self, request_id: str) -> OpenRequest | None:
        """The request of this id that this server is generating for."""
        return self._open.get(request_id)

    def asked_adapters(self) -> AskedAdapters:
        """The adapters of open requests."""
        names: dict[bool, set[str]] = {False: set(), True: set()}
        for order, _ in self._open.values():
            if order.model.adapter is not None:
                has_started = order.measures.queue_seconds is not None
                names[has_started].add(order.measures.asked_model or order.model.name)
        return AskedAdapters(running=frozenset(names[True]), waiting=frozenset(names[False]))

    async def start(self, order: Order) -> Running:
        """Submit the order if the tenant's limits let it pass; return once it is scheduled.

        Raises ApiError, an EngineError or a LimitReached.
        """
        _note_model(order)
        await self._check(order)
        generation = await self._admitted(order)
        try:
            started = await generation.start(
                is_loading=lambda: self._is_loading(order.model),
                patience_seconds=self._adapter_wait_seconds,
            )
        except BaseException:
            await generation.aclose()
            raise
        return Running(order, generation, started)

    # --- checking ---------------------------------------------------------------------------------

    async def _check(self, order: Order) -> None:
        """Raises ApiError or an EngineError for what this engine cannot generate."""
        _check_task(order)
        self._check_token_ids(order)
        self._check_proposer(order)
        self._check_kv_policy(order)
        objective_of(order, self._engine.info.latency_targets)
        self._check_endless(order)
        await self._check_grammar(order)

    def _check_token_ids(self, order: Order) -> None:
        vocab_size = self.vocab_size_of(order.model)
        for prompt in order.prompts:
            param = order.prompt_param
            if not prompt:
                raise ApiError("invalid_parameter", f"{param}: is empty", param=param)
            if max(prompt) >= vocab_size:
                raise _outside_vocabulary(param, vocab_size)
        if max(order.sampling.logit_bias, default=0) >= vocab_size:
            raise _outside_vocabulary("logit_bias", vocab_size)
        if max(order.sampling.allowed_token_ids, default=0) >= vocab_size:
            raise _outside_vocabulary("allowed_token_ids", vocab_size)

    def _check_proposer(self, order: Order) -> None:
        asked, served = order.speculation, self._engine.info.proposers
        if asked is not None and asked.proposer is not None and asked.proposer not in served:
            raise ProposerNotServed(asked.proposer, served)

    def _check_kv_policy(self, order: Order) -> None:
        obstacle = self._engine.info.kv_policy_obstacle
        if order.kv_policy is not None and obstacle is not None:
            raise KvPolicyNotServed(f"kv_policy: {obstacle}")

    def _check_endless(self, order: Order) -> None:
        obstacle = self._engine.info.endless_obstacle
        if order.is_endless and obstacle is not None:
            raise EndlessNotServed(f"endless: {obstacle}")

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

    # --- submitting and settling ------------------------------------------------------------------

    async def _admitted(self, order: Order) -> Generation:
        """The order's generation, if the tenant's limits let it pass; its account is open."""
        account = self._open_account(order)
        try:
            sequences = sequences_of(
                order,
                objective_of(order, self._engine.info.latency_targets),
                counters=account.counters,
                tokenizer=self.tokenizer_of(order.model),
            )
            await self._admit(order)
        except BaseException:
            self._metering.discard(account)
            raise
        return self._open_generation(order, sequences, account)

    async def _admit(self, order: Order) -> None:
        """Let the tenant's limits decide. Raises a LimitReached.

        A tenant that nothing limited when its key was looked up is not asked for: its first limit
        may be seen as late as a key's revocation.
        While the database is away there is nothing to ask: limits rest, what is used counts later.
        One that is only held by others for too long does not let the request past its limits.
        """
        if not order.principal.is_limited:
            return
        try:
            await self._admission.admit(order.principal.tenant_id, _demand(order), order.measures)
        except DatabaseBusy:
            raise
        except DatabaseUnavailable:
            log.warning("admitted_without_limits", request_id=order.request_id)

    def _open_account(self, order: Order) -> Account:
        return self._metering.open(
            order.request_id,
            order.principal,
            order.model,
            counts_prompt=[order.is_first_choice(index) for index in range(order.num_sequences)],
            admitted_at=order.admitted_at,
            held=order.held_charge,
        )

    def _open_generation(
        self, order: Order, sequences: Sequence[SequenceSpec], account: Account
    ) -> Generation:
        """The generation whose end settles the account."""
        shadow, rival, sample = shadow_of(order), rival_of(order), order.sample
        texts: list[str] | None = [] if shadow or rival or sample else None

        async def settle(outcome: Outcome) -> None:
            self._open.pop(order.request_id, None)
            await self._metering.settle(account, outcome)
            if texts is None or outcome.finish_reason == ABORTED:
                return
            text, counts = "".join(texts), outcome.counts
            num_tokens = counts.num_completion_tokens
            if shadow is not None:
                self._live_answers.shadowed.offer(LiveAnswer(order, shadow, text, num_tokens))
            if rival is not None:
                self._live_answers.judged.offer(LiveAnswer(order, rival, text, num_tokens))
            if sample is not None:
                sample.complete(text, outcome.finish_reason, counts)

        generation = Generation(
            sequences,
            engine=self._engine,
            tokenizer=self.tokenizer_of(order.model),
            metrics=self._metrics,
            arrived_at=order.arrived_at,
            measures=order.measures,
            meter=settle,
            figures=partial(self._tenant_figures, order.principal.tenant_id),
            deadline_at=order.deadline_at,
            record=texts,
        )
        self._open[order.request_id] = OpenRequest(order, generation)
        return generation

    def _is_loading(self, model: ServedModel) -> bool:
        stats = self._engine.stats
        if model.key is None or stats is None:
            return False
        tiers = {entry.key: entry.tier for entry in stats.adapters}
        return tiers.get(model.key) is not Tier.DEVICE


def _check_task(order: Order) -> None:
    """A classifier's head is all that was trained to answer; its embeddings are of use too."""
    is_classifier = order.model.classification is not None
    if order.pooling is Pooling.CLASSIFY and not is_classifier:
        raise NotAClassifier
    if order.pooling is None and is_classifier:
        raise ApiError("classifier_only")


def _note_model(order: Order) -> None:
    order.measures.model = order.model.name
    if order.model.adapter is not None:
        order.measures.adapter_name = order.model.adapter.name
        order.measures.adapter_version = order.model.adapter.version
    if order.model.adapter is not None and order.model.composition is None:
        order.measures.arm = order.model.adapter.arm


def _demand(order: Order) -> Demand:
    return Demand(
        request_id=order.request_id,
        key_id=order.principal.key_id,
        user_id=order.principal.user_id,
        admitted_at=order.admitted_at,
        is_batch=order.held_charge is not None,
        adapter=order.model.adapter,
        input_tokens=sum(map(len, order.prompts)),
        output_tokens=min(order.sampling.max_tokens * order.num_sequences, MAX_COUNT),
    )


def _outside_vocabulary(param: str, vocab_size: int) -> ApiError:
    message = f"{param}: has token ids outside [0, {vocab_size})"
    return ApiError("invalid_parameter", message, param=param)
