"""A simulated engine process: what an agent's supervisor starts instead of a real one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, fields
from random import Random
from typing import Any, cast

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout
from loraplex.adapters.status import AdapterStatus
from loraplex.adapters.tier import Tier
from loraplex.engine.messages import (
    Abort,
    EngineInfo,
    EngineReady,
    EngineStats,
    FinishReason,
    FromEngine,
    GenerationRequest,
    Prefetch,
    RequestFinished,
    RequestStarted,
    StepEvents,
    Submit,
    ToEngine,
)
from loraplex.engine.process.engine_process import DRAIN_SECONDS

from .adapters import Poison

START_SECONDS = 6.0
STEP_SECONDS = 0.02
LOAD_SECONDS = 0.3
STATS_SECONDS = 0.5
MAX_BATCH = 16
MAX_QUEUED = 24

_NOTHING = {
    entry.name: cast(Any, 0)
    for entry in fields(EngineStats)
    if entry.default is MISSING and entry.default_factory is MISSING
}


@dataclass(slots=True)
class _Sequence:
    request: GenerationRequest
    num_steps: int = 0
    num_lone_steps: int = 0


class SimulatedProcess:
    """Has the members of `EngineProcess` that a supervisor uses."""

    pid = 0

    def __init__(
        self,
        poisons: Mapping[AdapterKey, Poison],
        random: Random,
        note_death: Callable[[AdapterKey], None],
    ) -> None:
        self._poisons, self._random, self._note_death = poisons, random, note_death
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._residents: set[AdapterKey] = set()
        self._to_load: list[AdapterKey] = []
        self._changed: list[AdapterKey] = []
        self._is_stepping = False
        self._parts: Sequence[Sequence[_Sequence]] = [[]]
        self._step_request_ids: Set[str] = frozenset()

    async def run(self, on_message: Callable[[FromEngine], None]) -> int:
        self._send = on_message
        self._loop.call_later(START_SECONDS, self._begin)
        status = await self._ended
        await asyncio.sleep(DRAIN_SECONDS)
        return status

    def kill(self) -> None:
        if not self._ended.done():
            self._ended.set_result(-9)

    def end_by_chance(self) -> None:
        """Something else ends it, in any of the passes of a step."""
        self._step_request_ids = _ids(self._random.choice(self._parts))
        self.kill()

    async def stop(self) -> None:
        self.kill()

    async def dump_and_kill(self) -> None:
        self.kill()

    # --- the heartbeat ----------------------------------------------------------------------------

    @property
    def heartbeat(self) -> SimulatedProcess:
        return self

    @property
    def step_request_ids(self) -> Set[str]:
        return self._step_request_ids

    @property
    def count(self) -> int:
        """It never stalls."""
        return int(self._loop.time() * 1000)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, message: ToEngine) -> None:
        if self._ended.done():
            return
        match message:
            case Submit(request):
                sequence = _Sequence(request, num_lone_steps=request.num_lone_steps)
                self._waiting.append(sequence)
                self._want(request.adapter)
                self._go_on()
            case Abort(request_id):
                self._abort(request_id)
            case Prefetch(key):
                self._want(key)
            case _:
                pass  # pins and deletions are not simulated

    def _begin(self) -> None:
        if not self._ended.done():
            self._send(EngineReady(_INFO))
            self._report()

    def _report(self) -> None:
        if self._ended.done():
            return
        changed, self._changed = self._changed, []
        leases = Counter(each.request.adapter for each in self._running)
        stats = EngineStats(
            **{
                **_NOTHING,
                "num_running": len(self._running),
                "num_waiting": len(self._waiting),
                "adapters": [AdapterStatus(key, Tier.DEVICE, 1, leases[key]) for key in changed],
            }
        )
        self._send(stats)
        self._loop.call_later(STATS_SECONDS, self._report)

    def _abort(self, request_id: str) -> None:
        for queue in (self._waiting, self._running):
            for sequence in queue:
                if sequence.request.request_id == request_id:
                    queue.remove(sequence)
                    self._send(StepEvents(finished=[_end(sequence, FinishReason.ABORTED)]))
                    return

    # --- adapters ---------------------------------------------------------------------------------

    def _want(self, key: AdapterKey | None) -> None:
        if key is None or key in self._residents or key in self._to_load:
            return
        self._to_load.append(key)
        if len(self._to_load) == 1:
            self._loop.call_later(LOAD_SECONDS, self._loaded)

    def _loaded(self) -> None:
        if self._ended.done():
            return
        key = self._to_load.pop(0)
        self._residents.add(key)
        self._changed.append(key)
        if self._to_load:
            self._loop.call_later(LOAD_SECONDS, self._loaded)
        self._go_on()

    # --- steps ------------------------------------------------------------------------------------

    def _go_on(self, num_passes: int = 1) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self._loop.call_later(STEP_SECONDS * num_passes, self._step)

    def _step(self) -> None:
        self._is_stepping = False
        if self._ended.done():
            return
        started = self._admit()
        self._parts = _parts_of(self._running)
        for part in self._parts:
            self._step_request_ids = _ids(part)
            for sequence in part:
                if self._is_last_step(sequence):
                    return
                sequence.num_steps += 1
        finished = [each for each in self._running if each.num_steps >= _num_tokens(each)]
        if started or finished:
            self._running = [each for each in self._running if each not in finished]
            ends = [_end(each, FinishReason.LENGTH) for each in finished]
            self._send(StepEvents(started=started, finished=ends))
        if self._running:
            self._go_on(len(self._parts))

    def _admit(self) -> list[RequestStarted]:
        started = []
        for sequence in list(self._waiting):
            key = sequence.request.adapter
            if len(self._running) == MAX_BATCH:
                break
            if key is None or key in self._residents:
                self._waiting.remove(sequence)
                self._running.append(sequence)
                started.append(RequestStarted(sequence.request.request_id, 0.0, 0.0, None, 0))
        return started

    def _is_last_step(self, sequence: _Sequence) -> bool:
        """Whether the adapter has just killed the process."""
        key = sequence.request.adapter
        poison = self._poisons.get(key) if key is not None else None
        if key is None or poison is None or not poison.kills(sequence.num_steps, self._random):
            return False
        self._note_death(key)
        self.kill()
        return True


def _parts_of(running: Sequence[_Sequence]) -> Sequence[Sequence[_Sequence]]:
    """As `batch.parts_of` states it."""
    parts: dict[AdapterKey | None, list[_Sequence]] = {None: []}
    for sequence in running:
        is_lone = sequence.num_lone_steps > 0
        sequence.num_lone_steps -= is_lone
        parts.setdefault(sequence.request.adapter if is_lone else None, []).append(sequence)
    return list(parts.values())


def _ids(part: Sequence[_Sequence]) -> Set[str]:
    return {each.request.request_id for each in part}


def _num_tokens(sequence: _Sequence) -> int:
    return sequence.request.sampling.max_tokens or 1


def _end(sequence: _Sequence, reason: FinishReason) -> RequestFinished:
    request = sequence.request
    return RequestFinished(
        request.request_id, reason, len(request.prompt_token_ids), sequence.num_steps
    )


_INFO = EngineInfo(
    base_id="base",
    runtime_id="runtime",
    layout=BaseLayout("base", ()),
    model_type="simulated",
    num_parameters=0,
    vocab_size=1000,
    max_model_len=4096,
    device="cpu",
    dtype="float32",
    quantization="none",
    num_kv_blocks=0,
    kv_block_size=16,
    arena_bytes=1_000_000,
    host_cache_bytes=0,
    max_num_seqs=MAX_BATCH,
)
