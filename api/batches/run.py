"""Answers one batch: checks its file, answers its lines, writes its results to files.

It may stop at any point, and another run, of this server or another, does the rest: what is done is
in the database. A line is answered by a request of the key that created the batch. Its result and
its charge are committed in one transaction, so it is charged once, for the answer in the results.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from ...adapters.errors import ObjectCorrupt, ObjectNotFound
from ...adapters.failpoints import failpoint
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.base import JsonObject, utc_now
from ...platform.batches import files, service
from ...platform.batches.file_models import FilePurpose, StoredFile
from ...platform.batches.models import Batch
from ...platform.batches.service import Counts, OpenBatch, Result
from ...platform.batches.states import BatchState
from ...platform.errors import FileNotFound
from ...platform.sessions import TenantRows, TenantSession
from ..control_plane.control_plane import ControlPlane
from ..inference.metering import Metering
from ..telemetry.metrics import Metrics
from .call import Answer, App, call
from .input_file import InputFile, open_input
from .line import BatchLine
from .result_files import ResultFiles
from .result_lines import answered_line, unanswered_line
from .tenant_files import TenantFiles

log = structlog.get_logger(__name__)

LINES_IN_FLIGHT = 32
"""Of one batch at a time."""
WATCH_SECONDS = 1.0
"""How often a run looks whether its batch was cancelled or has expired."""
MAX_ATTEMPTS = 3
"""At a line whose answer is an error of the server that may pass."""
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
WAITING_CODES = frozenset(
    {
        *("engine_unavailable", "database_unavailable", "store_unavailable"),
        *("overloaded", "shutting_down"),
    }
)
"""Errors of the whole server: a line waits until they have passed, like for its tenant's limits."""
_RESULTS_AT_ONCE = 200

_UNANSWERED = {
    BatchState.CANCELLING: ("batch_cancelled", "The batch was cancelled before this request."),
    BatchState.FINALIZING: ("batch_expired", "The completion window ended before this request."),
}


@dataclass(frozen=True, slots=True)
class RunServices:
    """What the runs of a server use."""

    app: App
    control_plane: ControlPlane
    metering: Metering
    files: TenantFiles
    metrics: Metrics


class BatchRun:
    """One server's work on one batch, whose lease it has."""

    def __init__(self, services: RunServices, batch: OpenBatch) -> None:
        self._services = services
        self._control_plane = services.control_plane
        self._tenant_id = batch.tenant_id
        self._batch_id = batch.batch_id

    async def run(self) -> None:
        """Return when the batch has ended. Raises a PlatformError or an AdapterError; another run
        does the rest."""
        batch = await self._read()
        if batch.ended_at is not None:
            return
        with self._services.files.staged() as path:
            found = await self._open_input(batch, path)
            failpoint("batches.checked")
            if not isinstance(found, InputFile):
                await self._fail(found)
                return
            try:
                await self._run(found)
            finally:
                found.close()

    async def _run(self, lines: InputFile) -> None:
        batch = await self._control_plane.write(
            self._tenant_id, lambda session: service.begin(session, self._batch_id, len(lines))
        )
        failpoint("batches.begun")
        if batch.state is BatchState.IN_PROGRESS:
            await self._answer_lines(batch, lines)
        await self._end(lines)

    # --- its file -----------------------------------------------------------------------------

    async def _open_input(self, batch: Batch, path: Path) -> InputFile | list[JsonObject]:
        try:
            file = await self._control_plane.read(
                self._tenant_id, lambda session: files.get_input(session, batch.input_file_id)
            )
            await self._services.files.fetch(self._tenant_id, file, path)
        except (FileNotFound, ObjectNotFound, ObjectCorrupt):
            message = f"The file `{batch.input_file_id}` cannot be read: upload it again."
            return [{"code": "file_not_found", "message": message, "param": None, "line": None}]
        return await asyncio.to_thread(open_input, path, batch.endpoint)

    async def _fail(self, errors: list[JsonObject]) -> None:
        def fail(session: TenantSession) -> Changed[Batch]:
            batch = service.fail(session, self._batch_id, errors)
            return Changed(batch, _ended(batch))

        await self._control_plane.change(self._tenant_id, BY_SYSTEM, fail)

    # --- its lines ----------------------------------------------------------------------------

    async def _answer_lines(self, batch: Batch, lines: InputFile) -> None:
        """Return when all lines have results, or the batch was cancelled or has expired."""
        answered = await self._control_plane.read(
            self._tenant_id, lambda session: service.list_answered(session, self._batch_id)
        )
        todo = (number for number in range(len(lines)) if number not in answered)
        work = asyncio.create_task(self._answer_all(batch, lines, todo))
        try:
            while await self._may_go_on():
                if (await asyncio.wait([work], timeout=WATCH_SECONDS))[0]:
                    return await work
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def _may_go_on(self) -> bool:
        batch = await self._read()
        return batch.state is BatchState.IN_PROGRESS and utc_now() < batch.expires_at

    async def _answer_all(self, batch: Batch, lines: InputFile, todo: Iterator[int]) -> None:
        async def answer_some() -> None:
            for number in todo:
                await self._answer_line(batch, lines, number)

        workers = [asyncio.create_task(answer_some()) for _ in range(LINES_IN_FLIGHT)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _answer_line(self, batch: Batch, lines: InputFile, number: int) -> None:
        """Answer a line until its result is kept, or its server's errors do not pass."""
        custom_id, body = lines[number]
        num_attempts = 0
        while True:
            line = BatchLine(batch.key_id)
            try:
                answer = await call(self._services.app, batch.endpoint, body, line, batch.address)
                failpoint("batches.answered")
                num_attempts += not _waits(answer)
                if not _may_pass(answer, num_attempts):
                    await self._keep(number, custom_id, answer, line)
                    failpoint("batches.kept")
                    return
            finally:
                await self._services.metering.drop(line.held)
            await asyncio.sleep(_pause(answer, num_attempts))

    async def _keep(self, number: int, custom_id: str, answer: Answer, line: BatchLine) -> None:
        """Commit the line's result, together with its charge."""
        content = answered_line(self._batch_id, number, custom_id, answer)
        result = Result(self._batch_id, number, answer.is_success, content)
        add_result = partial(_add_result, result)
        if line.held.account is not None:
            await self._services.metering.commit(line.held, add_result)
        else:  # it was refused before anything was charged
            await self._control_plane.write_plain(self._tenant_id, add_result)
        self._services.metrics.batches.note_line(is_success=answer.is_success)

    # --- its end ------------------------------------------------------------------------------

    async def _end(self, lines: InputFile) -> None:
        batch = await self._control_plane.write(
            self._tenant_id, lambda session: service.close(session, self._batch_id)
        )
        failpoint("batches.closed")
        with self._services.files.staged() as output, self._services.files.staged() as errors:
            with ResultFiles(output, errors) as written:
                await self._write_results(batch, lines, written)
            counts = Counts(written.num_completed, written.num_failed)
            output_file = await self._store(batch, "output", output)
            error_file = await self._store(batch, "error", errors)
        failpoint("batches.stored")

        def finish(session: TenantSession) -> Changed[Batch]:
            ended = service.finish(
                session, self._batch_id, counts=counts, output=output_file, errors=error_file
            )
            return Changed(ended, _ended(ended))

        await self._control_plane.change(self._tenant_id, BY_SYSTEM, finish)
        failpoint("batches.ended")

    async def _write_results(self, batch: Batch, lines: InputFile, written: ResultFiles) -> None:
        """Write a line for each of the batch's lines, in their order."""
        number = 0
        while results := await self._control_plane.read(
            self._tenant_id,
            lambda session: service.list_results(
                session, self._batch_id, after=written.last, limit=_RESULTS_AT_ONCE
            ),
        ):
            for result in results:
                self._write_unanswered(batch, lines, range(number, result.number), written)
                written.add(result)
                number = result.number + 1
        self._write_unanswered(batch, lines, range(number, len(lines)), written)

    def _write_unanswered(
        self, batch: Batch, lines: InputFile, numbers: range, written: ResultFiles
    ) -> None:
        code, message = _UNANSWERED[batch.state]
        for number in numbers:
            custom_id = lines[number].custom_id
            written.add_unanswered(
                unanswered_line(self._batch_id, number, custom_id, code=code, message=message)
            )

    async def _store(self, batch: Batch, kind: str, path: Path) -> StoredFile | None:
        """The file of these results, whose bytes are in the store; None for an empty one.

        Its id follows from the batch's, so a repetition stores the same object.
        """
        size_bytes = path.stat().st_size
        if not size_bytes:
            return None
        now = utc_now()
        file = StoredFile(
            id=f"file-{hashlib.sha256(f'{batch.id}:{kind}'.encode()).hexdigest()[:32]}",
            key_id=batch.key_id,
            purpose=FilePurpose.BATCH_OUTPUT,
            filename=f"{batch.id}_{kind}.jsonl",
            size_bytes=size_bytes,
            sha256=await asyncio.to_thread(_sha256_of, path),
            created_at=now,
            expires_at=now + self._services.files.kept_for,
        )
        await self._services.files.put(self._tenant_id, file, path)
        return file

    async def _read(self) -> Batch:
        return await self._control_plane.read(
            self._tenant_id, lambda session: service.get_batch(session, self._batch_id)
        )


def _add_result(result: Result, session: TenantRows) -> bool:
    return service.add_result(session, result)


def _waits(answer: Answer) -> bool:
    """Whether the answer tells of limits or of the whole server, not of the line."""
    if answer.is_success or not answer.error.retryable:
        return False
    return answer.status == 429 or answer.error.code in WAITING_CODES


def _may_pass(answer: Answer, num_attempts: int) -> bool:
    """Whether the line is to be sent again."""
    if answer.is_success or not answer.error.retryable:
        return False
    return _waits(answer) or num_attempts < MAX_ATTEMPTS


def _pause(answer: Answer, num_attempts: int) -> float:
    if answer.retry_after_seconds is not None:
        return min(max(answer.retry_after_seconds, 0.1), MAX_PAUSE_SECONDS)
    pause: float = FIRST_PAUSE_SECONDS * 2**num_attempts
    return pause


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ended(batch: Batch) -> Event:
    details: JsonObject = {
        "state": batch.state,
        "lines": batch.num_lines,
        "completed": batch.num_completed,
        "failed": batch.num_failed,
    }
    return Event("batch.end", batch.id, details)
