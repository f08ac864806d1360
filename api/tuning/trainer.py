"""One trainer process, controlled by the server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from ...adapters.json_frames import Inbox
from ...adapters.niceness import yield_processor
from ...engine.tuning.messages import FromTrainer, ToTrainer, decode_from_trainer, encode

# -P: do not import from the working directory.
TRAINER_COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.tuning.process")
_RECEIVE_BYTES = 1 << 16
_STDERR = 2


class Trainer:
    """A running trainer. Its standard input is the socket; it ends when the socket is closed."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(
        cls, command: Sequence[str], *, environment: Mapping[str, str], folder: Path
    ) -> Self:
        """Start a process in this folder, which is also its home. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=theirs.fileno(),
                stdout=_STDERR,
                cwd=folder,
                env={**environment, "HOME": str(folder), "TMPDIR": str(folder)},
                # Its own group: a signal to the server's does not reach it, and it is killed with
                # all processes that it started.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        yield_processor(process.pid)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToTrainer) -> None:
        """Send without waiting. If the process has ended, the message is dropped."""
        self._writer.write(encode(message))

    async def receive(self) -> AsyncIterator[FromTrainer]:
        """Every message until the process closes its socket. Raises MessageRefused."""
        inbox = Inbox()
        with suppress(ConnectionError):  # it was killed
            while data := await self._reader.read(_RECEIVE_BYTES):
                for content in inbox.take(data):
                    yield decode_from_trainer(content)

    def kill(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> int:
        """End the process, and wait for its end; returns its exit status, negative for a signal."""
        self._writer.close()
        self.kill()
        return await self._process.wait()
