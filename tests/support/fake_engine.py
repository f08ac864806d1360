"""An engine process without a model: `python -m support.fake_engine ENDPOINT HEARTBEAT CONFIG`.

The real process, protocol and client around a core that repeats a request's prompt, one token per
step, or with as many draft tokens as the request specifies, all of them accepted. The prompt may
instead be one of the words below. `config.model` is a directory in which successive processes know
of each other: each adds a letter to its file `lives`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, cast

from loraplex.adapters.disk_cache import file_name
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout
from loraplex.adapters.manager import Tier
from loraplex.adapters.status import AdapterLoad, AdapterStatus, ExtentUse
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import InvalidParameter, UnsupportedModel
from loraplex.engine.heartbeat import Heartbeat
from loraplex.engine.messages import (
    Abort,
    AdapterEvicted,
    AdapterExplanation,
    AdapterFetched,
    AdapterFetchFailed,
    AdapterWanted,
    DeleteAdapter,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    EvictionReceipt,
    ExplainAdapter,
    FinishReason,
    FromEngine,
    GenerationRequest,
    GroupPages,
    KvUse,
    ListRequests,
    MapMemory,
    MemoryMap,
    Prefetch,
    PrefixPiece,
    RequestFinished,
    RequestList,
    RequestStarted,
    RequestState,
    SetPinned,
    StepEvents,
    Submit,
    ToEngine,
    TokensGenerated,
)
from loraplex.engine.process.main import main

HANG = [1000]
"""Starts and gives one token; ends only by an abort."""
QUEUE = [1001]
"""Never starts in the process's first life."""
EXIT = [1002]
"""Ends the process without a word."""
RAISE = [1003]
"""Makes the engine's step fail."""
STUCK = [1005]
"""Makes the engine's step last for ever."""
NAN = [1006]
"""Ends with `numerical_error`."""
GARBLE = [1004]
"""Makes the engine send what nobody understands."""

FAIL_FILE = "fail"
"""In the model's directory: the engine refuses to start, for the reason in the file."""
EXIT_FILE = "exit"
"""In the model's directory: the engine dies while it starts."""
BASE_ID_FILE = "base_id"
PACE_FILE = "pace"
"""In the model's directory: how many seconds a step takes."""
_LIVES_FILE = "lives"


_NOTHING = EngineStats(
    **{
        entry.name: cast(Any, 0)
        for entry in fields(EngineStats)
        if entry.default is MISSING and entry.default_factory is MISSING
    }
)


class FakeCore:
    """Speaks for the engine."""

    def __init__(self, config: EngineConfig) -> None:
        home = Path(config.model)
        with (home / _LIVES_FILE).open("a") as lives:
            lives.write("x")
        if (home / FAIL_FILE).exists():
            raise UnsupportedModel((home / FAIL_FILE).read_text())
        if config.speculation:
            raise InvalidParameter("speculation", "this engine has no proposer")
        if (home / EXIT_FILE).exists():
            os._exit(3)
        self._life = count_lives(home)
        self._pace = float(_read(home / PACE_FILE) or 0)
        self.info = fake_info(_read(home / BASE_ID_FILE) or "base")
        self._requests: dict[str, GenerationRequest] = {}
        self._outputs: dict[str, list[int]] = {}
        self._lone_steps: Counter[str] = Counter()
        self._num_pieces: Counter[str] = Counter()
        """Of the requests that wait for a prefix."""
        self._fetched: dict[AdapterKey, Tier] = {}
        self._deleted: set[AdapterKey] = set()
        self._wanted: set[AdapterKey] = set()
        self._pinned: set[AdapterKey] = set()
        self._outbox: list[FromEngine] = []
        self._events = StepEvents()

    @property
    def awaits_message(self) -> bool:
        return not (self._outbox or self._requests or self._events.finished)

    def report_progress_to(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case PrefixPiece():
                self._take_prefix(message)
            case Abort(request_id):
                if request_id in self._requests:
                    self._finish(request_id, FinishReason.ABORTED)
            case AdapterFetched(key, paths, tier):
                for part, path in zip(key.parts, paths, strict=True):
                    assert Path(path).name in (part.digest, file_name(part))
                self._fetched[key] = tier
                status = AdapterStatus(key, Tier.DEVICE, 0, 0)
                self._outbox.append(replace(self._stats(), adapters=[status], gone_adapters=[]))
            case AdapterFetchFailed(key, error):
                self._wanted.discard(key)
                for request in list(self._requests.values()):
                    if request.adapter == key:
                        self._finish(request.request_id, FinishReason.ERROR, error)
            case DeleteAdapter(key, drain_seconds):
                self._fetched.pop(key, None)
                self._deleted.add(key)
                receipt = EvictionReceipt(device_bytes=100, seconds=drain_seconds)
                self._outbox.append(AdapterEvicted(key, receipt))
            case SetPinned(keys):
                self._pinned = set(keys)
                for key in keys:
                    self._want(key)
            case Prefetch(key):
                self._want(key)
            case ExplainAdapter(key):
                self._outbox.append(self._explain(key))
            case ListRequests(number, tenant_id, limit):
                self._outbox.append(self._list(number, tenant_id, limit))
            case MapMemory(number):
                self._outbox.append(self._map(number))

    def step(self) -> list[FromEngine]:
        ready = [
            request
            for request in self._requests.values()
            if request.adapter is None or request.adapter in self._fetched
        ]
        if ready:
            time.sleep(self._pace)
        for part in self._parts([request for request in ready if not self._is_held(request)]):
            self._heartbeat.begin_step(request.request_id for request in part)
            for request in part:
                self._advance(request)
        messages, self._outbox = [self._events, *self._outbox], []
        self._events = StepEvents()
        return messages if messages != [StepEvents()] else []

    def _parts(self, requests: list[GenerationRequest]) -> list[list[GenerationRequest]]:
        """As `batch.parts_of`."""
        lone = [request for request in requests if self._lone_steps[request.request_id] > 0]
        self._lone_steps.subtract(request.request_id for request in lone)
        parts: dict[AdapterKey | str, list[GenerationRequest]] = {}
        for request in lone:
            parts.setdefault(request.lone_key, []).append(request)
        return [[each for each in requests if each not in lone], *parts.values()]

    def _submit(self, request: GenerationRequest) -> None:
        if request.prompt_token_ids == RAISE:
            raise RuntimeError("the step failed")
        if request.prompt_token_ids == GARBLE:
            self._outbox.append(cast(FromEngine, Abort("not from here")))
            return
        self._requests[request.request_id] = request
        self._lone_steps[request.request_id] = request.num_lone_steps
        if request.adapter is not None:
            self._want(request.adapter)

    def _take_prefix(self, piece: PrefixPiece) -> None:
        request = self._requests.get(piece.request_id)
        if request is None or not request.awaits_prefix:
            return
        self._num_pieces[piece.request_id] += len(piece.groups)
        if piece.is_last:
            self._requests[piece.request_id] = replace(request, awaits_prefix=False)

    def _export(self, request: GenerationRequest) -> None:
        """Two pieces of no pages. A prompt that begins with HANG is computed and never sent."""
        for index in range(2 if request.prompt_token_ids[0] != HANG[0] else 0):
            piece = PrefixPiece(request.request_id, [GroupPages([], [])], is_last=index == 1)
            self._outbox.append(piece)

    def _want(self, key: AdapterKey) -> None:
        if key not in self._wanted:
            self._wanted.add(key)
            self._outbox.append(AdapterWanted(key))

    def _explain(self, key: AdapterKey) -> AdapterExplanation:
        tier = self._fetched.get(key, Tier.STORE)
        state = "resident" if key in self._fetched else "stored"
        is_pinned = key in self._pinned
        load = AdapterLoad(key, state, tier, None, None, None, 0, None, 0, 0, 0, is_pinned)
        return AdapterExplanation(load)

    def _list(self, number: int, tenant_id: str | None, limit: int) -> RequestList:
        found = [
            RequestState(
                request_id=request.request_id,
                tenant_id=request.tenant_id,
                adapter=request.adapter,
                state="waiting" if self._is_held(request) else "decoding",
                waits_for="turn" if self._is_held(request) else None,
                age_seconds=1.0,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_computed_tokens=len(request.prompt_token_ids),
                num_generated_tokens=len(self._outputs.get(request.request_id, [])),
                num_preemptions=0,
                priority=request.priority,
            )
            for request in self._requests.values()
            if tenant_id in (None, request.tenant_id)
        ]
        return RequestList(number, found[:limit], len(found))

    def _map(self, number: int) -> MemoryMap:
        extents = [
            ExtentUse(key, place, 1, "idle", key in self._pinned, 0, 0.0, None)
            for place, key in enumerate(self._fetched)
        ]
        return MemoryMap(number, extents, [], KvUse(0, 0, 0, 0, 0), [], 0, 0, 0)

    def _is_held(self, request: GenerationRequest) -> bool:
        is_queued = request.prompt_token_ids == QUEUE and self._life == 1
        return is_queued or request.awaits_prefix

    def _advance(self, request: GenerationRequest) -> None:
        prompt, events = request.prompt_token_ids, self._events
        if self._is_held(request):
            return
        if prompt == EXIT:
            os._exit(3)
        if prompt == STUCK:
            threading.Event().wait()
        if prompt == NAN:
            error = ErrorInfo("numerical_error", "not finite")
            self._finish(request.request_id, FinishReason.ERROR, error)
            return
        output = self._outputs.get(request.request_id)
        if output is None:
            tier = self._fetched.get(request.adapter) if request.adapter else None
            num_cached = self._num_pieces.pop(request.request_id, 0)
            events.started.append(RequestStarted(request.request_id, 0.0, 0.0, tier, num_cached))
            self._outbox.append(self._stats())
            output = self._outputs[request.request_id] = []
        elif prompt == HANG:
            return
        if not request.sampling.max_tokens:
            self._finish(request.request_id, FinishReason.LENGTH)
            if request.exports_prefix:
                self._export(request)
            return
        num_drafted = _num_drafted(request, len(output))
        start = len(output)
        output += [prompt[index % len(prompt)] for index in range(start, start + 1 + num_drafted)]
        events.tokens.append(
            TokensGenerated(request.request_id, output[start:], num_draft_tokens=num_drafted)
        )
        if len(output) == request.sampling.max_tokens:
            self._finish(request.request_id, FinishReason.LENGTH)

    def _stats(self) -> EngineStats:
        adapters = [AdapterStatus(key, Tier.DEVICE, 0, 0) for key in reversed(self._fetched)]
        gone = [key for key in self._deleted if key not in self._fetched]
        num_running = len(self._requests)
        return replace(_NOTHING, num_running=num_running, adapters=adapters, gone_adapters=gone)

    def _finish(
        self, request_id: str, reason: FinishReason, error: ErrorInfo | None = None
    ) -> None:
        request = self._requests.pop(request_id)
        num_generated = len(self._outputs.pop(request_id, []))
        self._events.finished.append(
            RequestFinished(request_id, reason, len(request.prompt_token_ids), num_generated, error)
        )


def _num_drafted(request: GenerationRequest, num_generated: int) -> int:
    """The first token is not drafted, and no more are drafted than may follow."""
    if request.speculation is None or not num_generated:
        return 0
    room = request.sampling.max_tokens - num_generated
    return min(request.speculation.num_tokens or 0, room - 1)


def count_lives(home: Path) -> int:
    """How many processes have been started for this directory."""
    return len(_read(home / _LIVES_FILE))


def fake_info(base_id: str) -> EngineInfo:
    return EngineInfo(
        base_id=base_id,
        runtime_id=base_id,
        layout=BaseLayout(base_id, ()),
        model_type="fake",
        num_parameters=0,
        vocab_size=2000,
        max_model_len=4096,
        device="cpu",
        dtype="float32",
        quantization="none",
        num_kv_blocks=0,
        kv_block_size=16,
        arena_bytes=0,
        host_cache_bytes=0,
    )


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    os._exit(main(FakeCore))
