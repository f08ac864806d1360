"""The server's client of the egress process: starts it, calls it, and restarts it if it ends."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping, Sequence

import structlog

from ...adapters.child import PYTHON
from ...adapters.json_frames import Inbox, MessageRefused, in_frame
from ...adapters.niceness import yield_processor
from ...platform.webhooks.target import TargetPolicy
from ..control_plane.background_loop import BackgroundLoop
from .egress_messages import Deliver, Delivered, Open, decode_from_egress
from .sender import Answered

log = structlog.get_logger(__name__)

EGRESS_COMMAND = (*PYTHON, "-m", "loraplex.api.webhooks.egress_process")
CALL_SECONDS = 60.0
"""A process that has not answered after this long is ended. A name may resolve slowly."""
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 15.0
GOOD_LIFE_SECONDS = 60.0
"""After a process has run for this long, the restart delays start over."""
_RECEIVE_BYTES = 1 << 16
_STDERR = 2


class EgressEnded(Exception):
    """The egress process ended before it answered, or is starting; the request may have been
    sent."""


class EgressClient:
    """Runs the egress process of one server."""

    def __init__(
        self,
        policy: TargetPolicy,
        *,
        environment: Mapping[str, str],
        command: Sequence[str] = EGRESS_COMMAND,
    ) -> None:
        """`environment`: the complete environment of the process."""
        hosts, networks = map(str, policy.hosts), map(str, policy.networks)
        self._open = in_frame(Open(list(hosts), list(networks)))
        self._environment = dict(environment)
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        """The connection to the ready process; None while there is none."""
        self._calls: dict[int, asyncio.Future[Answered]] = {}
        self._call_ids = itertools.count(1)
        self._loop = BackgroundLoop(self._keep_alive)

    @property
    def pid(self) -> int | None:
        """The process id of the ready process; None while there is none."""
        return self._process.pid if self._process and self._writer else None

    @property
    def is_ready(self) -> bool:
        """Whether there is a process that takes deliveries."""
        return self._writer is not None

    def start(self) -> None:
        """Start the process; deliveries fail until it is ready."""
        self._loop.start()

    async def close(self) -> None:
        """End the process; running deliveries fail."""
        await self._loop.close()

    async def deliver(self, url: str, headers: Mapping[str, str], body: bytes) -> Answered:
        """Send the body by POST. Raises EgressEnded."""
        if self._writer is None:
            raise EgressEnded
        call_id = next(self._call_ids)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        self._writer.write(in_frame(Deliver(call_id, url, dict(headers), body)))
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await answer
        except TimeoutError:
            log.warning("egress_stalled")
            self._kill()
            raise EgressEnded from None
        finally:
            self._calls.pop(call_id, None)

    # --- inside -----------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            began_at = loop.time()
            try:
                await self._live()
            except (OSError, MessageRefused) as exc:
                log.warning("egress_failed", error=str(exc))
            if loop.time() - began_at >= GOOD_LIFE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _live(self) -> None:
        """Run one process, from its start to its end."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=theirs.fileno(),
                stdout=_STDERR,
                cwd="/",  # not the server's working directory
                env=self._environment,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process = process
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            yield_processor(process.pid)
            writer.write(self._open)
            await self._receive(reader, writer)
        finally:
            self._writer = None
            writer.close()
            self._kill()
            self._fail_calls()
            status = await process.wait()
            log.info("egress_process_ended", status=status)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the process ends. Raises MessageRefused."""
        inbox = Inbox()
        while data := await reader.read(_RECEIVE_BYTES):
            for content in inbox.take(data):
                message = decode_from_egress(content)
                if not isinstance(message, Delivered):
                    self._writer = writer
                    continue
                answer = self._calls.get(message.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(
                        Answered(message.status, message.failure, message.retry_after)
                    )

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _fail_calls(self) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EgressEnded())
