"""The engine process: `python -m loraplex.engine.process.main SOCKET HEARTBEAT CONFIG`.

CONFIG is an EngineConfig as JSON, SOCKET the descriptor of one end of a pair, HEARTBEAT the file in
which the parent watches progress. Standard input carries the key of prefixes on disk and nothing
else; its end means that the parent has exited. No child outlives the parent. SIGTERM ends the
process at once; draining is the parent's task.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Never, Protocol

import msgspec

from ...adapters.logs import log_to_stderr
from ..config import EngineConfig
from ..errors import EngineError, MalformedMessage
from ..heartbeat import Heartbeat
from ..kv.tier_key import TIER_KEY_BYTES
from ..lifeline import end_with_parent
from ..messages import EngineFailed, EngineInfo, EngineReady, ErrorInfo, FromEngine, ToEngine
from .gc_tuning import GarbageCollection
from .parent_socket import ParentGone, ParentSocket
from .transport import decode_to_engine, encode

IDLE_POLL_MS = 250
"""The interval of an idle engine's steps, which keep its statistics fresh."""
BUSY_POLL_MS = 1
"""How long to wait for messages if there is work but no step can run, for example during a load."""

_log = logging.getLogger("loraplex.engine.process.main")  # its own name is "__main__"


class Core(Protocol):
    """The interface of EngineCore for the loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def awaits_message(self) -> bool: ...

    def report_progress_to(self, heartbeat: Heartbeat) -> None: ...

    def handle(self, message: ToEngine) -> None: ...

    def step(self) -> list[FromEngine]: ...


def main(make_core: Callable[[EngineConfig], Core] | None = None) -> int:
    """Serve until the parent ends this process; returns the exit status of a failure."""
    gc.disable()  # a fifth of the start's CPU time; GarbageCollection takes over
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log_to_stderr()
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # progress bars are for terminals, and no log lines
    prefix_key = os.read(sys.stdin.fileno(), TIER_KEY_BYTES)
    end_with_parent()
    descriptor, heartbeat_path, config_json = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)  # it ends with this process
    with ParentSocket(socket.socket(fileno=int(descriptor))) as parent:
        try:
            config = msgspec.json.decode(config_json, type=EngineConfig)
            if config.trainer_cpus:
                os.sched_setaffinity(0, os.sched_getaffinity(0) - set(config.trainer_cpus))
            core = make_core(config) if make_core else _load_core(config, prefix_key)
            _serve(core, parent, Heartbeat(Path(heartbeat_path)))
        except ParentGone:
            return 0
        except Exception as exc:  # the parent reports why the process ended
            _log_failure(exc)
            _send(parent, EngineFailed(_as_error_info(exc)))
    return 1


def _load_core(config: EngineConfig, prefix_key: bytes) -> Core:
    from ..core import EngineCore  # here: the parent is watched while torch is imported
    from ..parts import open_parts

    return EngineCore(open_parts(config, prefix_key=prefix_key))


def _serve(core: Core, parent: ParentSocket, heartbeat: Heartbeat) -> Never:
    core.report_progress_to(heartbeat)
    garbage = GarbageCollection(time.monotonic)
    _send(parent, EngineReady(core.info))
    plan = "; ".join(core.info.memory_plan)
    about = {"pid": os.getpid(), "base_id": core.info.base_id, "memory_plan": plan}
    _log.info("engine_ready", extra=about)
    timeout_ms = 0
    while True:
        for message in _receive(parent, timeout_ms):
            core.handle(message)
        messages = core.step()
        heartbeat.beat()
        for answer in messages:
            _send(parent, answer)
        timeout_ms = 0 if messages else BUSY_POLL_MS
        if core.awaits_message:
            timeout_ms = IDLE_POLL_MS
        garbage.collect_if_due(is_idle=core.awaits_message)


def _receive(parent: ParentSocket, timeout_ms: int) -> Iterator[ToEngine]:
    for frames in parent.receive(timeout_ms):
        try:
            yield decode_to_engine(frames)
        except MalformedMessage as exc:
            _log.error("message_refused", extra={"error": str(exc)})


def _send(parent: ParentSocket, message: FromEngine) -> None:
    parent.send(encode(message))


def _log_failure(exc: Exception) -> None:
    """Log only unexpected errors: the parent reports an EngineError itself, once."""
    if not isinstance(exc, EngineError):
        _log.exception("engine_failed")


def _as_error_info(exc: Exception) -> ErrorInfo:
    if isinstance(exc, EngineError):
        return ErrorInfo(exc.code, str(exc))
    return ErrorInfo(EngineError.code, f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    os._exit(main())  # a loader thread that hangs must not keep a failed engine
