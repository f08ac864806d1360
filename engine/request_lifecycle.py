"""The requests of an engine, from their submission to their end."""

from __future__ import annotations

import logging
import math
import operator
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ..adapters.identity import AdapterKey
from .errors import (
    AdapterDeleted,
    EndlessNotServed,
    EngineError,
    InvalidParameter,
    KvPolicyNotServed,
)
from .handover.prefix_handover import PrefixHandover
from .kv.prefix_cache import CacheNamespace
from .kv_policy import EvictionMethod, KvPolicy
from .messages import (
    AdapterEvicted,
    EngineInfo,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    PrefixPiece,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    Resources,
    SpeculationParams,
    StepEvents,
    TokensGenerated,
)
from .parts import EngineParts
from .reports.statistics import Statistics
from .request import Request
from .sampling_params import MAX_LOGPROBS
from .scheduling.drains import Drains

logger = logging.getLogger(__name__)

REAP_INTERVAL_SECONDS = 5.0
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class RequestLifecycle:
    """Accepts requests, announces their progress, and ends each exactly once."""

    def __init__(self, parts: EngineParts, info: EngineInfo, statistics: Statistics) -> None:
        self._info = info
        self._eos_token_ids = parts.base.eos_token_ids
        self._rotary_contexts = parts.base.rotary_contexts
        self._kv_policy = parts.config.default_kv_policy
        self._clock = parts.clock
        self._scheduler = parts.scheduler
        self._manager = parts.tiers.manager
        self._grammars = parts.grammars
        self._speculation = parts.speculation
        self.handover = PrefixHandover(
            parts.kv,
            parts.runner,
            parts.plan.kv_block_bytes,
            parts.clock,
            is_divided=parts.config.num_ranks > 1,
        )
        self._holds: Counter[str] = Counter()
        """For how many things each held request waits."""
        self._awaiting: set[str] = set()
        """The requests that wait for a prefix."""
        self._events = StepEvents()
        """Announced since the last `take_events`."""
        self._ended: list[Request] = []
        """Those whose ends are among them."""
        self._kv_block_bytes = parts.plan.kv_block_bytes
        self._statistics = statistics
        self._next_reap_time = parts.clock() + REAP_INTERVAL_SECONDS
        self._drains = Drains(
            scheduler=parts.scheduler,
            manager=parts.tiers.manager,
            kv=parts.kv,
            clock=parts.clock,
            abort=self.fail,
            forget_outputs=parts.speculation.forget_outputs,
        )

    def submit(self, submitted: GenerationRequest) -> None:
        """Queue a request. One that is refused ends with the error."""
        if self._scheduler.get(submitted.request_id):
            # An end event under this id would end the first request's stream.
            logger.error("request id %s is in use", submitted.request_id)
            return
        request = self._open(_with_kv_policy(submitted, self._kv_policy))
        try:
            self._check(submitted)
            self._queue(request)
        except EngineError as exc:
            self.fail(request, exc)

    def take_prefix(self, piece: PrefixPiece) -> None:
        """Keep a piece for the request that waits for it. Others are ignored: it may have ended."""
        if piece.request_id not in self._awaiting:
            return
        request = self._scheduler.get(piece.request_id)
        assert request is not None, "what has ended waits no longer"
        self.handover.store(request, piece)
        if piece.is_last:
            self._awaiting.remove(piece.request_id)
            request.prefix_wait_seconds = self._clock() - request.arrival_time
            self._let_go(request)

    def abort(self, request_id: str) -> None:
        """Abort a request. Unknown and finished ids are ignored."""
        if request := self._scheduler.get(request_id):
            self.finish(request, FinishReason.ABORTED)

    def delete_adapter(self, key: AdapterKey, drain_seconds: float) -> None:
        """Refuse new requests for this adapter. End the others by the deadline; see `Drains`."""
        self.handover.forget(key)
        self._drains.begin(key, drain_seconds)

    def poll(self) -> list[AdapterEvicted]:
        """Reap lost leases, release requests whose grammar is compiled, advance deletions.

        Returns the deletions that are complete. Call it after `AdapterManager.poll`.
        """
        if self._clock() >= self._next_reap_time:
            self._reap()
        if self.handover.has_unread:
            self.handover.poll()
        if self._grammars.pending:
            self._release_compiled()
        if not self._drains.open:
            return []
        return [AdapterEvicted(key, receipt) for key, receipt in self._drains.poll()]

    def start(self, events: Iterable[RequestStarted]) -> None:
        """Announce requests that were scheduled for the first time."""
        for event in events:
            request = self._scheduler.get(event.request_id)
            assert request is not None, "a request has not ended when it is scheduled"
            self._statistics.start(request, event)
            self._events.started.append(event)

    def read(self, read: PromptOutput) -> None:
        """Announce log-probabilities or the embedding of a part of a prompt."""
        self._events.prompts.append(read)

    def generate(self, request: Request, generated: TokensGenerated) -> None:
        """Announce new tokens, before they are appended to the request."""
        self._statistics.generate(request, len(generated.token_ids))
        self._events.tokens.append(generated)

    @property
    def has_events(self) -> bool:
        events = self._events
        return bool(events.started or events.prompts or events.tokens or events.finished)

    def take_events(self) -> StepEvents:
        """The events announced since the last call. Ends say what the requests have used, so the
        seconds of the steps that were read must be charged."""
        events, self._events = self._events, StepEvents()
        if self._ended:
            events.finished[:] = map(self._settle, self._ended, events.finished)
            self._ended.clear()
        return events

    def finish(
        self, request: Request, reason: FinishReason, *, stop_token_id: int | None = None
    ) -> None:
        """End a request that is complete or was aborted."""
        self._end(request, reason, stop_token_id=stop_token_id)

    def fail(self, request: Request, error: EngineError) -> None:
        """End a request with an error. The scheduler may have dropped it already."""
        self._end(request, FinishReason.ERROR, error)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        error: EngineError | None = None,
        *,
        stop_token_id: int | None = None,
    ) -> None:
        self._scheduler.finish(request)
        if request.submitted.exports_prefix and reason is FinishReason.LENGTH:
            self.handover.export(request, is_deleted=request.adapter in self._drains)
        if request.submitted.remembers_output and request.adapter and reason in _COMPLETE:
            self._speculation.remember(request)
        self._awaiting.discard(request.request_id)
        self._ended.append(request)
        del self._holds[request.request_id]
        self._events.finished.append(
            RequestFinished(
                request_id=request.request_id,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_generated_tokens=request.num_generated_tokens,
                error=_as_info(error) if error else None,
                stop_token_id=stop_token_id,
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
            )
        )
        self._speculation.forget(request.request_id)
        self._grammars.forget(request, error)
        self._drains.note_end(request, is_deleted=isinstance(error, AdapterDeleted))

    def _settle(self, request: Request, end: RequestFinished) -> RequestFinished:
        """Its end with what it has used."""
        request.is_settled = True
        held_seconds = request.kv.held_seconds if request.started else ()
        used = Resources(
            step_seconds=request.step_seconds,
            kv_byte_seconds=math.fsum(map(operator.mul, self._kv_block_bytes, held_seconds)),
            loaded_bytes=request.loaded_bytes,
            fetched_bytes=request.fetched_bytes,
        )
        return replace(end, used=used)

    def _reap(self) -> None:
        """Release leases whose requests have ended without releasing them, and drop old outputs."""
        self._next_reap_time = self._clock() + REAP_INTERVAL_SECONDS
        self._manager.reap(self._scheduler.leased_request_ids)
        self._speculation.drop_old_outputs()

    def _release_compiled(self) -> None:
        for request, error in self._grammars.poll():
            if error is None:
                self._let_go(request)
            else:
                self.fail(request, error)

    def _open(self, submitted: GenerationRequest) -> Request:
        adapter, seed = submitted.adapter, submitted.sampling.seed
        start = submitted.adapter_start
        return Request(
            submitted=submitted,
            namespace=CacheNamespace(
                submitted.tenant_id,
                self._info.runtime_id,
                adapter if start is not None else None,
                submitted.cache_namespace,
                rotary_start=self._rotary_contexts.start(submitted.greatest_length),
                adapter_start=start or 0,
            ),
            seed=secrets.randbits(63) if seed is None else seed,
            arrival_time=self._clock(),
            adapter_tier=self._manager.tier(adapter) if adapter else None,
            eos_token_ids=self._eos_token_ids,
        )

    def _check(self, submitted: GenerationRequest) -> None:
        _check_token_ids(submitted, submitted.vocab_size or self._info.vocab_size)
        _check_reading(submitted)
        self._speculation.check(submitted.speculation)
        if submitted.kv_policy and self._info.kv_policy_obstacle:
            raise KvPolicyNotServed(f"kv_policy: {self._info.kv_policy_obstacle}")
        if submitted.is_endless and self._info.endless_obstacle:
            raise EndlessNotServed(f"endless: {self._info.endless_obstacle}")
        if submitted.adapter in self._drains:
            raise AdapterDeleted

    def _queue(self, request: Request) -> None:
        """Hand the request to the scheduler, which holds it until its grammar is compiled and its
        prefix has come."""
        has_grammar = request.submitted.sampling.grammar is not None
        awaits = request.submitted.awaits_prefix
        self._scheduler.add(request, is_held=has_grammar or awaits)
        self._holds[request.request_id] = has_grammar + awaits
        if awaits:
            self._awaiting.add(request.request_id)
        if has_grammar:
            self._grammars.prepare(request)

    def _let_go(self, request: Request) -> None:
        """One of the things for which the request waits is there."""
        self._holds[request.request_id] -= 1
        if not self._holds[request.request_id]:
            self._scheduler.release(request)


def _with_kv_policy(submitted: GenerationRequest, default: KvPolicy | None) -> GenerationRequest:
    """The request with the policy that applies to it."""
    policy = submitted.kv_policy or default
    if policy is None:
        return submitted
    speculation = submitted.speculation
    if policy.method is EvictionMethod.H2O:  # the attention of wrong draft tokens must not count
        speculation = SpeculationParams(num_tokens=0)
    return replace(submitted, kv_policy=policy, speculation=speculation)


def _check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    if not request.prompt_token_ids:
        raise InvalidParameter("prompt", "is empty")
    if not all(0 <= token < vocab_size for token in request.prompt_token_ids):
        raise InvalidParameter("prompt", f"has token ids outside [0, {vocab_size})")
    if not all(0 <= token < vocab_size for token in request.sampling.logit_bias):
        raise InvalidParameter("logit_bias", f"has token ids outside [0, {vocab_size})")
    if not all(0 <= token < vocab_size for token in request.sampling.allowed_token_ids):
        raise InvalidParameter("allowed_token_ids", f"has token ids outside [0, {vocab_size})")


def _check_reading(request: GenerationRequest) -> None:
    num_logprobs, pooling = request.num_prompt_logprobs, request.pooling
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        raise InvalidParameter("prompt_logprobs", f"must be from 0 to {MAX_LOGPROBS}")
    if pooling is not None and (num_logprobs is not None or request.sampling.max_tokens):
        raise InvalidParameter("pooling", "goes with neither output nor log-probabilities")


def _as_info(error: EngineError) -> ErrorInfo:
    return ErrorInfo(error.code, str(error), error.retry_after_seconds, error.is_retryable)
