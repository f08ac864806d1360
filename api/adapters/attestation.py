"""Attestation: probe requests measure a new version's effect on the base's logits.

The probes are normal requests in the engine's batch, with a separate prefix cache. If the operator
configured a reference base, its logits with the same adapter are compared with the served ones. A
version that was not attested when the server stopped is attested after the next start.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, NamedTuple

import structlog

from ...adapters.failpoints import failpoint
from ...adapters.identity import AdapterKey
from ...adapters.tenant_queues import TenantQueues
from ...engine.errors import EngineError
from ...engine.messages import GenerationRequest, RequestFinished, TokensGenerated
from ...engine.process.engine import Engine
from ...engine.sampling_params import SamplingParams
from ...platform.adapters import repository, service, uploads
from ...platform.adapters.models import AdapterVersion
from ...platform.adapters.states import VersionState
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.base import JsonObject, new_id
from ...platform.errors import InvalidTransition
from ...platform.sessions import TenantSession
from ..contract.errors import ApiError, as_api_error, from_error_info
from ..control_plane.control_plane import ControlPlane
from ..control_plane.database_watch import until_answered
from ..control_plane.leases import LeaseLost, Leases
from ..control_plane.periodic import Periodic
from .probes import Effect, Logits, compare, shared_logits, summarize
from .quantization_contract import DRIFTED, NOT_MEASURED, Drift, NotMeasured, QuantizationContract

log = structlog.get_logger(__name__)

NUM_WORKERS = 4
"""Concurrent attestations; at most half of them are of one tenant."""
WATCH_SECONDS = 30.0
"""How often a server looks for attestations of stopped servers."""
CACHE_NAMESPACE = "attestation"
LOAD_FAILED = "adapter_load_failed"
_MESSAGES = {
    "numerical_error": "The model's output with this adapter is not finite: lower alpha, or use "
    "an earlier checkpoint."
}
"""The messages for the pusher. The engine's own messages address a requester."""
MAX_LOAD_FAILURES = 5
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
_PROBE_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Verdict(NamedTuple):
    """The result of an attestation."""

    effect: Effect | None
    """None: the probes failed."""
    reason: str | None
    """The published code of a rejection; None for a version that is ready."""
    message: str = ""
    reference: Drift | str = NOT_MEASURED
    """The comparison of the served with the unquantized base, or why there is none."""

    @property
    def report(self) -> dict[str, Any] | None:
        """The report shown for the version; None if the probes failed."""
        if self.effect is None:
            return None
        found = self.reference
        reference = found.as_report() if isinstance(found, Drift) else found
        return {**self.effect.as_report(), "reference": reference}


class _Probed(NamedTuple):
    """The probe results of one adapter."""

    effect: Effect
    logits: list[Logits]
    """Under the adapter, by prompt."""


class Attestations:
    """The versions to attest, round-robin over tenants; one per server."""

    def __init__(
        self,
        *,
        engine: Engine,
        control_plane: ControlPlane,
        prompts: list[list[int]],
        leases: Leases,
        contract: QuantizationContract | None = None,
    ) -> None:
        """Without a `contract`, reports state that the reference was not measured."""
        self._engine = engine
        self._control_plane = control_plane
        self._prompts = prompts
        self._contract = contract
        self._leases = leases
        self._queues: TenantQueues[AdapterVersion] = TenantQueues(NUM_WORKERS)
        self._known: set[str] = set()
        """The waiting and running versions."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks = Periodic(
            self.recover, seconds=WATCH_SECONDS, log=log, failed="attestations_not_seen"
        )

    def start(self) -> None:
        self._looks.start()

    async def recover(self) -> None:
        """Queue the versions that were accepted but not attested, by any server."""
        unfinished = await self._control_plane.read_all_tenants(
            repository.list_unfinished_versions_of_all_tenants
        )
        for version in unfinished:
            if version.state in (VersionState.VALIDATED, VersionState.ATTESTING):
                self.add(version)

    def add(self, version: AdapterVersion) -> None:
        """Queue the version. One of another base waits until that base is served."""
        if version.base_id == self._engine.info.base_id and version.id not in self._known:
            self._known.add(version.id)
            self._queues.add(version.tenant_id, version)
            self._begin_next()

    async def close(self) -> None:
        await self._looks.close()
        self._queues.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin_next(self) -> None:
        while taken := self._queues.take():
            task = asyncio.create_task(self._work(taken[1]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _work(self, version: AdapterVersion) -> None:
        try:
            await self._attest_once(version)
        except (LeaseLost, InvalidTransition):
            log.info("attestation_overtaken", version_id=version.id)  # or deleted
        except Exception:  # a defect for one version must not stop the queue
            log.exception("attestation_failed", version_id=version.id)
        finally:
            self._known.discard(version.id)
            self._queues.end(version.tenant_id)
            self._begin_next()

    async def _attest_once(self, version: AdapterVersion) -> None:
        """Attest the version, unless another server does. Raises LeaseLost or InvalidTransition if
        it has."""
        lease = f"attestation:{version.id}"
        if await until_answered(lambda: self._leases.claim(lease)):
            await self._leases.keep(lease, self._attest(version))
            await until_answered(lambda: self._leases.forget(lease))

    async def _attest(self, version: AdapterVersion) -> None:
        if version.state is VersionState.VALIDATED:
            await until_answered(lambda: self._begin(version))
        failpoint("attestation.begun")
        verdict = await self._measure(AdapterKey(version.tenant_id, version.digest))
        failpoint("attestation.measured")
        await until_answered(lambda: self._settle(version, verdict))
        failpoint("attestation.settled")
        log.info(
            "adapter_attested",
            tenant_id=version.tenant_id,
            adapter_digest=version.digest,
            reason=verdict.reason,
        )

    async def _begin(self, version: AdapterVersion) -> None:
        await self._control_plane.write(
            version.tenant_id, lambda session: service.begin_attestation(session, version.id)
        )

    async def _settle(self, version: AdapterVersion, verdict: Verdict) -> None:
        await self._control_plane.change(
            version.tenant_id, BY_SYSTEM, lambda session: _settle(session, version.id, verdict)
        )

    async def _measure(self, key: AdapterKey) -> Verdict:
        """The verdict. Outages are retried, because they say nothing about the adapter."""
        pause = FIRST_PAUSE_SECONDS
        num_load_failures = 0
        while True:
            try:
                probed = await self._probe(key)
                break
            except (ApiError, EngineError) as exc:
                error = as_api_error(exc)
            num_load_failures += error.code == LOAD_FAILED
            if not error.retryable or num_load_failures == MAX_LOAD_FAILURES:
                return Verdict(None, error.code, _MESSAGES.get(error.code, error.message))
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        verdict = _judge(probed.effect)
        if verdict.reason is None and self._contract is not None:
            return await self._hold_to(self._contract, verdict, key, probed.logits)
        return verdict

    async def _hold_to(
        self,
        contract: QuantizationContract,
        verdict: Verdict,
        key: AdapterKey,
        logits: list[Logits],
    ) -> Verdict:
        """The verdict with the comparison with the reference base; a drift beyond the limit
        rejects."""
        try:
            drift = await contract.measure(key, logits)
        except NotMeasured as exc:
            log.warning("reference_not_measured", adapter_digest=key.digest, error=str(exc))
            return verdict._replace(reference=f"{NOT_MEASURED}: {exc}")
        if drift.is_within_limit:
            return verdict._replace(reference=drift)
        return Verdict(verdict.effect, DRIFTED, drift.sentence, drift)

    async def _probe(self, key: AdapterKey) -> _Probed:
        """The base alone, then again in a batch with the adapter, because rounding depends on the
        batch.

        Raises ApiError or EngineError.
        """
        base = await self._logits(key.tenant_id, None)
        again, adapter = await asyncio.gather(
            self._logits(key.tenant_id, None), self._logits(key.tenant_id, key)
        )
        answers = zip(self._prompts, base, again, adapter, strict=True)
        effect = summarize([compare(len(prompt), *logits) for prompt, *logits in answers])
        return _Probed(effect, adapter)

    async def _logits(self, tenant_id: str, adapter: AdapterKey | None) -> list[Logits]:
        """The answers to all prompts, one after another: together they would make a long step for
        all requests in the batch."""
        return [await self._first_logits(tenant_id, prompt, adapter) for prompt in self._prompts]

    async def _first_logits(
        self, tenant_id: str, prompt: list[int], adapter: AdapterKey | None
    ) -> Logits:
        request = GenerationRequest(
            request_id=f"probe-{new_id()}",
            tenant_id=tenant_id,
            prompt_token_ids=prompt,
            sampling=_PROBE_SAMPLING,
            adapter=adapter,
            cache_namespace=CACHE_NAMESPACE,
            return_logits=True,
        )
        async with aclosing(self._engine.submit(request)) as events:
            async for event in events:
                if isinstance(event, TokensGenerated) and event.logits is not None:
                    return shared_logits(event.logits, self._engine.info.vocab_size)
                if isinstance(event, RequestFinished) and event.error is not None:
                    raise from_error_info(event.error)
        raise ApiError("engine_restarted")


def _judge(effect: Effect) -> Verdict:
    objection = effect.objection
    return Verdict(effect, None) if objection is None else Verdict(effect, "no_effect", objection)


def _settle(session: TenantSession, version_id: str, verdict: Verdict) -> Changed[None]:
    """Store the verdict; a ready version gets the aliases that its pushes requested."""
    report = verdict.report
    if verdict.reason is not None:
        version = service.mark_rejected(
            session,
            version_id,
            reason=verdict.reason,
            message=verdict.message,
            attestation_report=report,
        )
        details: JsonObject = {"reason": verdict.reason}
        return Changed(None, _event(session, "version.reject", version, details))
    version = service.mark_ready(session, version_id, attestation_report=report or {})
    wanted = uploads.list_wanted_aliases(session, version_id)
    is_set = [
        alias
        for name, alias, author in wanted
        if not service.set_free_aliases(session, name, [alias], version.number, changed_by=author)
    ]
    details = {"aliases": is_set}
    return Changed(None, _event(session, "version.ready", version, details))


def _event(
    session: TenantSession, action: str, version: AdapterVersion, details: JsonObject
) -> Event:
    name = repository.find_adapter_of(session, version).name
    return Event(action, f"{name}@{version.number}", details)
