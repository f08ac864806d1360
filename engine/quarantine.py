"""Keeping out what the engine breaks down under: requests and adapter versions, for a while.

Whoever shares a step with a culprit was there too, so presence is only a suspicion: a good answer
ends it, and it takes repeated breakdowns without one to be kept out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..adapters.identity import AdapterKey
from .errors import AdapterQuarantined, EngineError, NumericalError, RequestQuarantined
from .messages import FinishReason, GenerationRequest, RequestFinished

MAX_CRASHES = 2
MAX_NUMERICAL_ERRORS = 3
QUARANTINE_SECONDS = 600.0
"""A quarantine ends after so long, and so does a suspicion."""

RequestFingerprint = bytes
Suspect = AdapterKey | RequestFingerprint

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Suspicion:
    noted_at: float
    num_crashes: int = 0
    num_numerical_errors: int = 0

    @property
    def is_quarantine(self) -> bool:
        return self.num_crashes >= MAX_CRASHES or self.num_numerical_errors >= MAX_NUMERICAL_ERRORS


class Quarantine:
    """Who is suspected of what, and who is kept out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._suspicions: dict[Suspect, _Suspicion] = {}

    def note_crash(self, requests: Iterable[GenerationRequest]) -> None:
        """The engine stopped in a step of these requests."""
        self._forget_old()
        for suspect in {suspect for request in requests for suspect in _suspects(request)}:
            suspicion = self._suspicion(suspect)
            suspicion.num_crashes += 1
            _report(suspect, suspicion)

    def note_end(self, request: GenerationRequest, end: RequestFinished) -> None:
        """A request has ended: a good answer clears it, and its adapter."""
        if end.error is not None and end.error.code == NumericalError.code and request.adapter:
            self._forget_old()
            suspicion = self._suspicion(request.adapter)
            suspicion.num_numerical_errors += 1
            _report(request.adapter, suspicion)
        elif self._suspicions and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._clear(request)

    def objection(self, request: GenerationRequest) -> EngineError | None:
        """Why this request is not taken; None if it is."""
        self._forget_old()
        if not self._suspicions:
            return None
        if request.adapter and self.holds(request.adapter):
            return AdapterQuarantined()
        return RequestQuarantined() if self.holds(fingerprint(request)) else None

    def holds(self, suspect: Suspect) -> bool:
        self._forget_old()
        suspicion = self._suspicions.get(suspect)
        return suspicion is not None and suspicion.is_quarantine

    def _suspicion(self, suspect: Suspect) -> _Suspicion:
        suspicion = self._suspicions.setdefault(suspect, _Suspicion(0.0))
        if not suspicion.is_quarantine:  # its end does not move
            suspicion.noted_at = self._clock()
        return suspicion

    def _clear(self, request: GenerationRequest) -> None:
        for suspect in _suspects(request):
            if not self.holds(suspect):
                self._suspicions.pop(suspect, None)

    def _forget_old(self) -> None:
        horizon = self._clock() - QUARANTINE_SECONDS
        for suspect, suspicion in list(self._suspicions.items()):
            if suspicion.noted_at <= horizon:
                del self._suspicions[suspect]


def fingerprint(request: GenerationRequest) -> RequestFingerprint:
    """What makes two requests the same one, sent again: everything but its id and its seed."""
    sampling = replace(request.sampling, seed=None)
    asked = (request.pooling, request.num_prompt_logprobs)
    content = (request.tenant_id, request.adapter, request.prompt_token_ids, sampling, asked)
    return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()


def _suspects(request: GenerationRequest) -> Iterator[Suspect]:
    yield fingerprint(request)
    if request.adapter is not None:
        yield request.adapter


def _report(suspect: Suspect, suspicion: _Suspicion) -> None:
    if not suspicion.is_quarantine:
        return
    if isinstance(suspect, AdapterKey):
        facts = {"tenant_id": suspect.tenant_id, "adapter_digest": suspect.digest}
    else:
        facts = {"request_fingerprint": suspect.hex()}
    _log.error(
        "quarantined",
        extra={
            **facts,
            "num_crashes": suspicion.num_crashes,
            "num_numerical_errors": suspicion.num_numerical_errors,
            "seconds": QUARANTINE_SECONDS,
        },
    )
