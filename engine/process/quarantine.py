"""Quarantines requests and adapter versions under which the engine repeatedly crashes.

A crash only makes suspects, because every request of the step was present. A suspect's next
requests begin with separate forward passes; after another crash all of its passes are separate. A
successful answer clears the suspect, and a second crash, in a separate pass, quarantines it. A
tenant is a suspect too, so that it cannot crash the engine repeatedly with requests that all
differ: its crashes in separate passes are counted whether or not it gets other answers.

An adapter is proven by several answers (`proven_adapters.py`). Before that, one answer says little
of it: if it is a suspect, all of its passes are separate, and only the proof clears it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...adapters.identity import AdapterKey
from ..errors import AdapterQuarantined, EngineError, NumericalError, RequestQuarantined
from ..messages import EngineCrashed, FinishReason, GenerationRequest, RequestFinished
from .proven_adapters import ProvenAdapters

MAX_CRASHES = 2
"""Crashes without being cleared between them, the last one in a separate forward pass."""
MAX_TENANT_CRASHES = 4
"""Crashes in separate forward passes within QUARANTINE_SECONDS."""
FIRST_LONE_STEPS = 16
"""Steps in separate forward passes of a suspect's request after one crash. One crash may make many
suspects, and each separate pass takes time."""
ALL_STEPS = 1 << 30
MAX_NUMERICAL_ERRORS = 3
QUARANTINE_SECONDS = 600.0
"""A quarantine and a suspicion end after this time."""

RequestFingerprint = bytes
Suspect = AdapterKey | RequestFingerprint

_TENANT_MESSAGE = (
    "The engine crashed repeatedly while requests of this tenant ran alone: its requests are "
    "refused for ten minutes."
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Suspicion:
    noted_at: float
    num_crashes: int = 0
    crashed_at: float = float("-inf")
    was_alone: bool = False
    """Whether the last crash was in a separate forward pass. The ones before do not count: that an
    engine was killed while an innocent adapter ran alone does not make the next crash its own."""
    is_culprit: bool = False
    num_numerical_errors: int = 0

    @property
    def is_quarantine(self) -> bool:
        return self.is_culprit or self.num_numerical_errors >= MAX_NUMERICAL_ERRORS

    def note_crash(self, at: float, *, is_alone: bool) -> None:
        self.num_crashes += 1
        if at >= self.crashed_at:
            self.crashed_at, self.was_alone = at, is_alone
        self.is_culprit |= self.was_alone and self.num_crashes >= MAX_CRASHES


class Quarantine:
    """The suspects and the quarantined requests, versions and tenants."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_proven: Callable[[AdapterKey], None] = lambda key: None,
    ) -> None:
        """`on_proven` is called when an adapter's answers here have become its proof."""
        self._clock = clock
        self._on_proven = on_proven
        self._proven = ProvenAdapters(clock)
        self._suspicions: dict[Suspect, _Suspicion] = {}
        self._watched: dict[str, float] = {}
        """Tenants that were in a crash and had no successful answer since, with the time of the
        crash."""
        self._lone_crashes: dict[str, deque[float]] = {}

    def note_crash(self, crash: EngineCrashed) -> None:
        """An engine crashed."""
        self._forget_old()
        at = self._clock() - crash.seconds_ago
        for tenant_id in crash.tenant_ids:
            self._watched[tenant_id] = max(at, self._watched.get(tenant_id, at))
            if crash.is_alone:
                self._lone_crashes.setdefault(tenant_id, deque()).append(at)
        for key in crash.adapters:
            self._note_crash(key, at, is_alone=crash.is_alone)
            if key not in self._proven or self.holds(key):
                self._proven.disprove(key)
        is_lone_request = crash.is_alone and len(crash.fingerprints) == 1
        for request in crash.fingerprints:
            self._note_crash(request, at, is_alone=is_lone_request)

    def note_proven(self, key: AdapterKey) -> None:
        """The adapter has been proven elsewhere."""
        if not self.holds(key):
            self._proven.note_proven(key)
            self._clear(key)

    def is_proven(self, key: AdapterKey) -> bool:
        """Whether the adapter has answered so often that a crash is probably not its own."""
        return key in self._proven

    def num_lone_steps(self, request: GenerationRequest) -> int:
        """The number of the request's steps that run in separate forward passes."""
        self._forget_old()
        crashes = {each: self._num_crashes(each) for each in _suspects(request)}
        num_crashes = max(crashes.values())
        if not num_crashes:
            return FIRST_LONE_STEPS if request.tenant_id in self._watched else 0
        key = request.adapter
        is_unproven_suspect = key is not None and crashes[key] and key not in self._proven
        return ALL_STEPS if num_crashes > 1 or is_unproven_suspect else FIRST_LONE_STEPS

    def note_end(self, request: GenerationRequest, end: RequestFinished) -> None:
        """A request has ended: a successful answer clears it, and its adapter if that is proven."""
        if end.error is not None and end.error.code == NumericalError.code and request.adapter:
            self._forget_old()
            suspicion = self._suspicion(request.adapter, self._clock())
            suspicion.num_numerical_errors += 1
            _report(request.adapter, suspicion)
        elif end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._note_answer(request)

    def objection(self, request: GenerationRequest) -> EngineError | None:
        """Why this request is refused; None if it is not."""
        self._forget_old()
        if not self._has_suspects:
            return None
        if request.adapter and any(map(self.holds, {request.adapter, *request.adapter.parts})):
            return AdapterQuarantined()
        if len(self._lone_crashes.get(request.tenant_id, ())) >= MAX_TENANT_CRASHES:
            return RequestQuarantined(_TENANT_MESSAGE)
        return RequestQuarantined() if self.holds(fingerprint(request)) else None

    @property
    def _has_suspects(self) -> bool:
        return bool(self._suspicions or self._watched or self._lone_crashes)

    def holds(self, suspect: Suspect) -> bool:
        self._forget_old()
        suspicion = self._suspicions.get(suspect)
        return suspicion is not None and suspicion.is_quarantine

    def _suspicion(self, suspect: Suspect, at: float) -> _Suspicion:
        suspicion = self._suspicions.setdefault(suspect, _Suspicion(at))
        if not suspicion.is_quarantine:  # its end does not move
            suspicion.noted_at = max(suspicion.noted_at, at)
        return suspicion

    def _num_crashes(self, suspect: Suspect) -> int:
        suspicion = self._suspicions.get(suspect)
        return suspicion.num_crashes if suspicion else 0

    def _note_crash(self, suspect: Suspect, at: float, *, is_alone: bool) -> None:
        suspicion = self._suspicion(suspect, at)
        suspicion.note_crash(at, is_alone=is_alone)
        _report(suspect, suspicion)

    def _note_answer(self, request: GenerationRequest) -> None:
        key = request.adapter
        if key is not None and self._proven.note_answer(key):
            self._on_proven(key)
        if self._has_suspects:
            self._watched.pop(request.tenant_id, None)
            self._clear(fingerprint(request))
            if key is not None and (key in self._proven or not self._num_crashes(key)):
                self._clear(key)

    def _clear(self, suspect: Suspect) -> None:
        if not self.holds(suspect):
            self._suspicions.pop(suspect, None)

    def _forget_old(self) -> None:
        horizon = self._clock() - QUARANTINE_SECONDS
        for suspect, suspicion in list(self._suspicions.items()):
            if suspicion.noted_at <= horizon:
                del self._suspicions[suspect]
        for tenant_id, watched_at in list(self._watched.items()):
            if watched_at <= horizon:
                del self._watched[tenant_id]
        for tenant_id, crashes in list(self._lone_crashes.items()):
            while crashes and crashes[0] <= horizon:
                crashes.popleft()
            if not crashes:
                del self._lone_crashes[tenant_id]


def crash_of(requests: Sequence[GenerationRequest], *, is_alone: bool) -> EngineCrashed:
    """A crash in a forward pass of these requests. `is_alone`: see `EngineCrashed`."""
    adapters = {request.adapter for request in requests if request.adapter is not None}
    return EngineCrashed(
        fingerprints=list({fingerprint(request) for request in requests}),
        adapters=list(adapters),
        tenant_ids=list({request.tenant_id for request in requests}),
        is_alone=is_alone,
    )


def fingerprint(request: GenerationRequest) -> RequestFingerprint:
    """What a repeated request has in common with the first: everything but its id and its seed."""
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
