"""Starts the engine process, watches it, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ..config import EngineConfig
from ..errors import (
    BASE_ERRORS,
    EngineError,
    EngineUnavailable,
    InsufficientMemory,
    InvalidParameter,
    UnsupportedModel,
)
from ..heartbeat import SILENT_LOOKS, StallWatch
from ..messages import EngineInfo, ErrorInfo, FromEngine, ToEngine
from .engine import EngineState
from .engine_process import ENGINE_COMMAND, EngineProcess

STALLED = "stalled"
"""The code of the failure if a process was killed because it made no progress."""
_START_ERRORS: Mapping[str, type[EngineError]] = {
    **{error.code: error for error in BASE_ERRORS},
    InsufficientMemory.code: InsufficientMemory,
}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RestartPolicy:
    """The delay before the next start of a process that dies: it grows exponentially; then no
    process is started."""

    first_delay_seconds: float = 0.5
    max_delay_seconds: float = 30.0
    max_deaths: int = 5
    """This number of deaths within `window_seconds` is a crash loop."""
    stall_seconds: float = 10.0
    """A process without progress for this long while requests are open is ended."""
    window_seconds: float = 60.0
    """A process that ran for this long was healthy, so the delays start over."""
    _deaths: deque[float] = field(default_factory=deque)
    _num_short_lives: int = 0

    def next_delay(self, *, now: float, lived_seconds: float) -> float | None:
        """Seconds until the next start after a death at `now`; None: no further start."""
        while self._deaths and self._deaths[0] <= now - self.window_seconds:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) >= self.max_deaths:
            return None
        if lived_seconds >= self.window_seconds:
            self._num_short_lives = 0
        self._num_short_lives += 1
        doubled = self.first_delay_seconds * 2.0 ** min(self._num_short_lives - 1, 32)
        return min(doubled, self.max_delay_seconds)


class Death(NamedTuple):
    """How a process ended."""

    cause: ErrorInfo
    step_request_ids: Set[str]
    """The requests of its last step."""
    lived_seconds: float
    """Time since it was ready; 0 if it never was."""


class Supervisor:
    """Runs one engine process at a time and holds the engine's state."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        prefix_key: bytes,
        command: Sequence[str] = ENGINE_COMMAND,
        restarts: RestartPolicy | None = None,
        on_state: Callable[[], None] = lambda: None,
    ) -> None:
        """`prefix_key`: of the processes' prefixes on disk. `on_state` is called after each change
        of the state."""
        self._prefix_key = prefix_key
        self._on_state = on_state
        self._config = config
        self._command = command
        self._restarts = restarts or RestartPolicy()
        self._process: EngineProcess | None = None
        self._reported: ErrorInfo | None = None
        """The reason for ending the process, noted before it ends."""
        self._spawned_at = 0.0
        self._ready_at: float | None = None
        self._info: EngineInfo | None = None
        self._is_stopping = asyncio.Event()
        self._has_first_outcome = asyncio.Event()
        self._state = EngineState.STARTING
        self.start_seconds: float | None = None
        """The duration of the last successful start; None before the first."""
        self.failure: ErrorInfo | None = None
        """Why the engine is down; None while it starts for the first time, and when it is ready."""
        self.num_restarts = 0

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether the process accepts requests."""
        return self.state is EngineState.READY

    @property
    def is_stopping(self) -> bool:
        """Whether the engine was stopped."""
        return self._is_stopping.is_set()

    @property
    def pid(self) -> int | None:
        """The engine process, if one runs."""
        return None if self._process is None else self._process.pid

    @property
    def info(self) -> EngineInfo:
        """The description of the served engine, also during a restart. Raises EngineUnavailable
        before the first start has finished."""
        if self._info is None:
            raise EngineUnavailable
        return self._info

    @property
    def ready_seconds(self) -> float:
        """Time since the process became ready; 0 if it is not ready."""
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    def send(self, message: ToEngine) -> None:
        """Send without waiting; dropped if no process runs."""
        if self._process is not None:
            self._process.send(message)

    async def run_process(
        self, receive: Callable[[FromEngine], None], *, has_work: Callable[[], bool]
    ) -> Death:
        """Start a process and deliver its messages until it has ended.

        A process that makes no progress although it is ready and `has_work` is killed.
        """
        step_request_ids: Set[str] = frozenset()
        try:
            process = await self._spawn()
            status = await self._run(process, receive, has_work)
            step_request_ids = process.heartbeat.step_request_ids
            message = f"the engine process ended with status {status}"
        except OSError as exc:
            message = f"the engine process could not be started: {exc}"
        finally:
            self._process = None
        return self._note_death(step_request_ids, message)

    def note_ready(self, info: EngineInfo) -> None:
        """The process is ready. Raises UnsupportedModel if it serves another base than before."""
        if self._info is not None and self._info.base_id != info.base_id:
            error = UnsupportedModel("the base model's files have changed while it was served")
            self.note_failure(ErrorInfo(error.code, str(error)))
            raise error
        self._info = info
        self._set_state(EngineState.READY)
        self._ready_at = time.monotonic()
        self.start_seconds = self._ready_at - self._spawned_at
        self.failure = None
        self._has_first_outcome.set()

    def note_failure(self, error: ErrorInfo) -> None:
        """Note the reason for which the process is about to end."""
        self._reported = error

    async def until_first_outcome(self) -> None:
        """Return once the engine is ready for the first time.

        Raises UnsupportedModel, InsufficientMemory, InvalidParameter, or EngineUnavailable for all
        other reasons; `failure` has the engine's own code.
        """
        await self._has_first_outcome.wait()
        if not self.is_ready:
            failure = self.failure or ErrorInfo(EngineUnavailable.code, str(EngineUnavailable()))
            raise _start_error(failure)

    async def until_restart(self, death: Death) -> bool:
        """Wait until the next process may be started; False if none may be."""
        if self.is_stopping or self._info is None:  # `start` raises why
            return False
        _log.error("engine_died", extra={"code": death.cause.code, "error": death.cause.message})
        delay = self._restarts.next_delay(now=time.monotonic(), lived_seconds=death.lived_seconds)
        plan = "engine_stays_down" if delay is None else "engine_restart_planned"
        _log.warning(plan, extra={"delay_seconds": delay})
        if delay is None or await self._is_stopped_within(delay):
            return False
        self.num_restarts += 1
        return True

    async def stop(self) -> None:
        """End the process and start no other."""
        self._is_stopping.set()
        if self._process is not None:
            await self._process.stop()

    def note_down(self) -> None:
        """Note that no further process is started."""
        self._set_state(EngineState.DOWN)
        self._has_first_outcome.set()

    async def _spawn(self) -> EngineProcess:
        self._spawned_at = time.monotonic()
        self._process = process = await EngineProcess.spawn(
            self._config, prefix_key=self._prefix_key, command=self._command
        )
        if self.is_stopping:
            process.kill()
        return process

    async def _run(
        self,
        process: EngineProcess,
        receive: Callable[[FromEngine], None],
        has_work: Callable[[], bool],
    ) -> int:
        watching = asyncio.create_task(self._watch_progress(process, has_work))
        try:
            return await process.run(receive)
        finally:
            watching.cancel()

    async def _watch_progress(self, process: EngineProcess, has_work: Callable[[], bool]) -> None:
        """Kill a process that has work but makes no progress."""
        watch, seconds = StallWatch(), self._restarts.stall_seconds
        while True:
            await asyncio.sleep(seconds / SILENT_LOOKS)
            if watch.look(process.heartbeat.count, has_work=self.is_ready and has_work()):
                break
        self._set_state(EngineState.STALLED)
        message = f"the engine made no progress for {seconds:g} s while requests were open"
        self.note_failure(ErrorInfo(STALLED, message))
        _log.error("engine_stalled", extra={"pid": process.pid, "seconds": seconds})
        await process.dump_and_kill()

    def _set_state(self, state: EngineState) -> None:
        self._state = state
        self._on_state()

    def _note_death(self, step_request_ids: Set[str], message: str) -> Death:
        cause = self._reported or ErrorInfo(EngineUnavailable.code, message)
        death = Death(cause, step_request_ids, self.ready_seconds)
        self._set_state(EngineState.RESTARTING)
        self._ready_at = self._reported = None
        if not self.is_stopping:
            self.failure = cause
        return death

    async def _is_stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_stopping.wait()
        return self.is_stopping


def _start_error(failure: ErrorInfo) -> EngineError:
    """Why the engine did not start, as an error for the operator."""
    if failure.code == InvalidParameter.code:
        param, _, message = failure.message.partition(": ")
        return InvalidParameter(param, message)
    return _START_ERRORS.get(failure.code, EngineUnavailable)(failure.message)
