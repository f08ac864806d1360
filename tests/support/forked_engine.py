"""Engine processes forked from their server: what they import, 3 s of CPU, is imported once.

The server was itself forked from a warm process (`support.nursery`), which has imported both.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loraplex.engine.process.engine_process import ENGINE_COMMAND
from loraplex.engine.process.main import main as run_engine

IMPORTS = (
    *("loraplex.engine.core", "loraplex.engine.parts"),
    "transformers.models.llama.modeling_llama",
)
"""What an engine of the tests imports when it begins."""
NAME = "forked-engine"
"""Of the process, for `ps`; its command line is the warm process's."""
_create_subprocess_exec = asyncio.create_subprocess_exec


class ForkedEngine:
    """What the product uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status = asyncio.get_running_loop().create_future()
        descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(descriptor, self._reap, descriptor)

    async def wait(self) -> int:
        return int(await asyncio.shield(self._status))

    def send_signal(self, number: int) -> None:
        if self._status.done():
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(self.pid, 0)
        self._status.set_result(os.waitstatus_to_exitcode(status))


def is_forked_engine(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == NAME


async def create_subprocess_exec(*command: str, **options: Any) -> Any:
    """`asyncio.create_subprocess_exec`, but engines are forked."""
    if command[: len(ENGINE_COMMAND)] != ENGINE_COMMAND:
        return await _create_subprocess_exec(*command, **options)
    if pid := os.fork():
        return ForkedEngine(pid)
    try:
        _leave_server(options["stdin"], options["pass_fds"], options["env"])
        sys.argv = [run_engine.__module__, *command[len(ENGINE_COMMAND) :]]
        os._exit(run_engine())
    except BaseException:  # must not return to the frames of the server
        traceback.print_exc()
        os._exit(1)


def _leave_server(stdin: int, pass_fds: Sequence[int], env: Mapping[str, str]) -> None:
    """Keep of the server what a process that it starts has."""
    gc.freeze()  # no collection closes a descriptor whose number another file has now
    os.setsid()
    Path("/proc/self/comm").write_text(NAME)
    signal.set_wakeup_fd(-1)
    os.dup2(stdin, 0)
    os.dup2(2, 1)
    _close_all_but({0, 1, 2, *pass_fds})
    os.environ.clear()
    os.environ.update(env)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the list's own
                os.close(int(name))
