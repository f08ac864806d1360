"""One engine process, controlled by its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import msgspec

from ...adapters.logs import LOG_VARIABLES
from ..config import EngineConfig
from ..errors import MalformedMessage
from ..heartbeat import Heartbeat
from ..messages import FromEngine, ToEngine
from .engine_socket import EngineSocket
from .frames import Frames
from .transport import decode_from_engine, encode

# -P: do not import from the working directory.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.process.main")
STOP_SECONDS = 5.0
DUMP_SECONDS = 0.5
"""Maximum time for a stuck process to dump its stacks."""
DRAIN_SECONDS = 0.05
"""Maximum time for reading the last messages of a dead process."""

# What the maths and the model hub (its token included) read. The credentials of the database, the
# store and the platform are not among it: the engine has no use for them.
_PASSED_VARIABLES = (
    frozenset(
        (
            *("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
            *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
            *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
            "LRU_CACHE_CAPACITY",  # of what PyTorch has oneDNN compile
            "GLIBC_TUNABLES",
        )
    )
    | LOG_VARIABLES
)
_PASSED_PREFIXES = (
    *("LC_", "XDG_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "MALLOC_"),
)
DEFAULT_VARIABLES = {
    # Weights on huge pages, where the system lets programs ask for them: a step reads all weights,
    # and looking up pages of 4 KiB takes part of its time.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables of an engine process that the operator has not set."""

_STDERR = 2

_log = logging.getLogger(__name__)


class EngineProcess:
    """A running engine process and the socket to it. It logs to this process's standard error."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: EngineSocket,
        heartbeat: Heartbeat,
        resources: ExitStack,
    ) -> None:
        self._process = process
        self._socket = socket
        self.heartbeat = heartbeat
        self._resources = resources
        self._overdue: asyncio.TimerHandle | None = None
        """Kills a process that has closed its socket."""

    @classmethod
    async def spawn(
        cls,
        config: EngineConfig,
        *,
        prefix_key: bytes,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> Self:
        """Start a process. `prefix_key`: of its prefixes on disk. Raises OSError if the system
        cannot."""
        with ExitStack() as resources:
            # A file without a name: no other process can open it, and it ends with both processes.
            beats = resources.enter_context(tempfile.TemporaryFile())
            heartbeat_path = Path(f"/dev/fd/{beats.fileno()}")
            heartbeat = Heartbeat(heartbeat_path)
            ours, theirs = socket.socketpair()
            resources.enter_context(ours)
            stdin, lifeline = os.pipe()  # its end closes however this process ends
            resources.callback(os.close, lifeline)
            os.write(lifeline, prefix_key)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    str(heartbeat_path),
                    msgspec.json.encode(config).decode(),
                    stdin=stdin,
                    stdout=_STDERR,
                    env=engine_environment(os.environ),
                    pass_fds=[theirs.fileno(), beats.fileno()],
                    # Its own group: a signal to ours reaches us alone, and draining is ours to do.
                    start_new_session=True,
                )
            finally:
                os.close(stdin)
                theirs.close()
            kept = resources.pop_all()
        return cls(process, EngineSocket(ours), heartbeat, kept)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, on_message: Callable[[FromEngine], None]) -> int:
        """Deliver messages until the process has ended; returns its exit status.

        A process that sends a malformed message is killed, because the state of its requests is
        unknown. A process that closes its socket is killed if it has not ended STOP_SECONDS later:
        nothing can be said to it or heard from it.
        """
        self._socket.listen(lambda frames: self._take(frames, on_message), self._hear_the_end)
        try:
            status = await self._process.wait()
            await asyncio.sleep(DRAIN_SECONDS)
        finally:
            if self._overdue is not None:
                self._overdue.cancel()
            self._socket.close()
            self._resources.close()
        return status

    def send(self, message: ToEngine) -> None:
        """Send without waiting. If the process has ended, the message is dropped, and `run`
        returns."""
        if not self._socket.send(encode(message)):
            _log.info("engine_message_dropped", extra={"message_type": type(message).__name__})

    async def stop(self) -> None:
        """End the process, by force if it does not react. `run` then returns."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def dump_and_kill(self) -> None:
        """Kill a stuck process after it has dumped its threads' stacks to standard error."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            self._process.send_signal(signal.SIGCONT)  # one that was stopped cannot dump
            await asyncio.sleep(DUMP_SECONDS)
        self.kill()

    def _take(self, frames: Frames, on_message: Callable[[FromEngine], None]) -> None:
        try:
            on_message(decode_from_engine(frames))
        except Exception as exc:  # also a defect of a handler: the state of the requests is unknown
            self._give_up(exc)

    def _hear_the_end(self, error: MalformedMessage | None) -> None:
        if error is not None:
            self._give_up(error)
            return
        self._overdue = asyncio.get_running_loop().call_later(STOP_SECONDS, self.kill)

    def _give_up(self, error: Exception) -> None:
        _log.error("engine_message_not_understood", exc_info=error)
        self.kill()  # before it notices the closed socket and reports a failure
        self._socket.close()


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine process. It imports modules from the same paths as this
    process."""
    passed = {
        name: value
        for name, value in environment.items()
        if name in _PASSED_VARIABLES or name.startswith(_PASSED_PREFIXES)
    }
    return {**DEFAULT_VARIABLES, **passed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
