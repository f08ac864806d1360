"""One life of the engine process, seen from its parent, and when the next one may begin."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from ..config import EngineConfig
from ..heartbeat import Heartbeat
from ..messages import FromEngine, ToEngine
from .engine_socket import EngineSocket
from .frames import Frames
from .transport import decode_from_engine, encode

# -P: the working directory is no place to import from.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.process.main")
STOP_SECONDS = 5.0
DUMP_SECONDS = 0.5
"""For how long a stuck process may write down where it is stuck."""
DRAIN_SECONDS = 0.05
"""For how long the last words of a dead process are listened for."""

# What the maths and the model hub (its token included) read. The credentials of the database, the
# store and the platform are not among it: the engine has no use for them.
_PASSED_VARIABLES = frozenset(
    (
        *("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
        "LRU_CACHE_CAPACITY",  # of what PyTorch has oneDNN compile
    )
)
_PASSED_PREFIXES = (
    *("LC_", "XDG_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NVIDIA_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "ONEDNN_", "DNNL_", "MALLOC_"),
)

_STDERR = 2

_log = logging.getLogger(__name__)


class EngineProcess:
    """A running engine process and the socket to it. Its logs go to our standard error."""

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

    @classmethod
    async def spawn(
        cls,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        journal: Path | None = None,
    ) -> Self:
        """Start a process that counts tokens in `journal`. Raises OSError if the system cannot."""
        with ExitStack() as resources:
            # A file without a name: nobody else can reach it, and it is gone with both processes.
            beats = resources.enter_context(tempfile.TemporaryFile())
            heartbeat_path = Path(f"/dev/fd/{beats.fileno()}")
            heartbeat = Heartbeat(heartbeat_path)
            ours, theirs = socket.socketpair()
            resources.enter_context(ours)
            stdin, lifeline = os.pipe()  # its end closes however this process ends
            resources.callback(os.close, lifeline)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    str(heartbeat_path),
                    msgspec.json.encode(config).decode(),
                    *([str(journal)] if journal else []),
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
        """Hand over every message until the process has ended; its exit status.

        A process whose messages cannot be understood is killed: what its requests have come to is
        unknown from then on.
        """
        self._socket.listen(lambda frames: self._take(frames, on_message))
        try:
            status = await self._process.wait()
            await asyncio.sleep(DRAIN_SECONDS)
        finally:
            self._socket.close()
            self._resources.close()
        return status

    def send(self, message: ToEngine) -> None:
        """Send without waiting. To a process that has ended nothing is sent: `run` tells of it."""
        if not self._socket.send(encode(message)):
            _log.info("engine_message_dropped", extra={"message_type": type(message).__name__})

    async def stop(self) -> None:
        """End the process: at once if it listens, by force if it does not. `run` then returns."""
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
        """End a process that is stuck; the stacks of its threads go to standard error first."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            self._process.send_signal(signal.SIGCONT)  # one that was stopped cannot dump
            await asyncio.sleep(DUMP_SECONDS)
        self.kill()

    def _take(self, frames: Frames, on_message: Callable[[FromEngine], None]) -> None:
        try:
            on_message(decode_from_engine(frames))
        except Exception:
            _log.exception("engine_message_not_understood")
            self.kill()  # before it learns that nobody listens, which is no failure of its own
            self._socket.close()


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an engine process gets: it imports from where this process does."""
    passed = {
        name: value
        for name, value in environment.items()
        if name in _PASSED_VARIABLES or name.startswith(_PASSED_PREFIXES)
    }
    return {**passed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@dataclass(slots=True)
class RestartPolicy:
    """The delay before the next start of a process that dies: exponentially longer, then
    infinite."""

    first_delay_seconds: float = 0.5
    max_delay_seconds: float = 30.0
    max_deaths: int = 5
    """This number of deaths within `window_seconds` is a crash loop."""
    stall_seconds: float = 10.0
    """A process without progress for this long while requests are open is ended."""
    window_seconds: float = 60.0
    """Also: a process that ran for this long was healthy, so the delays start over."""
    _deaths: deque[float] = field(default_factory=deque)
    _num_short_lives: int = 0

    def next_delay(self, *, now: float, lived_seconds: float) -> float | None:
        """Seconds until the next life may begin after a death at `now`; None: never."""
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
