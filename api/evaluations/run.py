"""One step of an evaluation: score the answers so far, and end it or ask for more.

A step may stop at any point, and another one, of this server or another, repeats it: what it needs
is in the database and the store. A batch is created in the transaction that names it in the
evaluation, so nothing is asked twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...adapters.errors import ObjectCorrupt, ObjectNotFound
from ...adapters.failpoints import failpoint
from ...platform.audit.event import BY_SYSTEM, Changed, Event
from ...platform.base import utc_now
from ...platform.batches import files
from ...platform.batches.file_models import FilePurpose, StoredFile
from ...platform.batches.models import Batch
from ...platform.batches.service import COMPLETION_WINDOW
from ...platform.batches.states import BatchState
from ...platform.errors import FileNotFound, QuotaExceeded
from ...platform.evaluations import service
from ...platform.evaluations.models import Evaluation
from ...platform.evaluations.service import OpenEvaluation
from ...platform.evaluations.states import OPEN_STATES, EvaluationState
from ...platform.sessions import TenantSession
from ..batches.tenant_files import TenantFiles
from ..control_plane.control_plane import ControlPlane
from ..control_plane.tenant_threads import AsyncTenantThreads
from ..evaluation.report import Models
from .scoring_process import Scoring, ScoringFailed
from .scoring_task import Asks, Invalid, Outcome, Scored, ScoringTask, Valid


@dataclass(frozen=True, slots=True)
class RunServices:
    """What the steps of a server use."""

    control_plane: ControlPlane
    files: TenantFiles
    threads: AsyncTenantThreads
    """Those that wait for scoring processes."""
    scoring: Scoring


class EvaluationFailed(Exception):
    """The evaluation ends without a report."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EvaluationRun:
    """One server's work on one evaluation, whose lease it has."""

    def __init__(self, services: RunServices, evaluation: OpenEvaluation) -> None:
        self._services = services
        self._control_plane = services.control_plane
        self._tenant_id = evaluation.tenant_id
        self._evaluation_id = evaluation.evaluation_id

    async def run(self) -> None:
        """Return when the evaluation has ended, or waits for a batch. Raises a PlatformError or an
        AdapterError; another run repeats the step."""

        def begin(session: TenantSession) -> tuple[Evaluation, dict[str, Batch | None]]:
            evaluation = service.begin(session, self._evaluation_id)
            return evaluation, service.list_batches(session, evaluation)

        evaluation, batches = await self._control_plane.write(self._tenant_id, begin)
        if evaluation.state not in OPEN_STATES:
            return
        failpoint("evaluations.begun")
        try:
            await self._step(evaluation, batches)
        except EvaluationFailed as exc:
            await self._fail(exc)

    async def _step(self, evaluation: Evaluation, batches: dict[str, Batch | None]) -> None:
        with ExitStack() as stack:
            golden_set, lines = (
                stack.enter_context(self._services.files.staged()) for _ in range(2)
            )
            await self._fetch(evaluation.file_id, golden_set)
            answers: dict[str, str] = {}
            for name, batch in batches.items():
                path = stack.enter_context(self._services.files.staged())
                await self._fetch_answers(batch, path)
                answers[name] = str(path)
            task = ScoringTask(
                golden_set=str(golden_set),
                file_id=evaluation.file_id,
                models=_models(evaluation),
                judge=evaluation.judge,
                tolerance=evaluation.tolerance,
                sha256=evaluation.sha256,
                answers=answers,
                lines=str(lines),
            )
            match await self._score(task):
                case Asks(name, endpoint):
                    await self._ask(evaluation, name, endpoint, lines)
                case Scored() as scored:
                    await self._succeed(scored)
                case Invalid(problem):
                    raise EvaluationFailed("invalid_golden_set", problem)
                case Valid():
                    raise AssertionError("the task names models")

    async def _score(self, task: ScoringTask) -> Outcome:
        try:
            return await self._services.threads.run(
                self._tenant_id, self._services.scoring.run, task
            )
        except ScoringFailed as exc:
            raise EvaluationFailed("scoring_failed", str(exc)) from exc

    # --- what it reads ------------------------------------------------------------------------

    async def _fetch_answers(self, batch: Batch | None, path: Path) -> None:
        """Write the answers of a batch to `path`. Raises EvaluationFailed unless all are there."""
        if batch is None:
            raise EvaluationFailed("batch_not_completed", "A batch of the evaluation is gone.")
        if batch.errors:
            message = f"The batch `{batch.id}` has failed: {batch.errors[0]['message']}"
            raise EvaluationFailed("batch_not_completed", message)
        if batch.state is not BatchState.COMPLETED:
            message = f"The batch `{batch.id}` is {batch.state}."
            raise EvaluationFailed("batch_not_completed", message)
        if batch.num_failed:
            assert batch.error_file_id is not None, "lines have failed"
            await self._fetch(batch.error_file_id, path)
            message = (
                f"{batch.num_failed} of {batch.num_lines} requests have failed: "
                f"{await asyncio.to_thread(_first_error, path)} All are in the file "
                f"`{batch.error_file_id}`."
            )
            raise EvaluationFailed("requests_failed", message)
        assert batch.output_file_id is not None, "all lines have answers"
        await self._fetch(batch.output_file_id, path)

    async def _fetch(self, file_id: str, path: Path) -> None:
        try:
            file = await self._control_plane.read(
                self._tenant_id, lambda session: files.get_input(session, file_id)
            )
            await self._services.files.fetch(self._tenant_id, file, path)
        except (FileNotFound, ObjectNotFound, ObjectCorrupt) as exc:
            message = f"The file `{file_id}` cannot be read."
            raise EvaluationFailed("file_not_found", message) from exc

    # --- what it changes ----------------------------------------------------------------------

    async def _ask(self, evaluation: Evaluation, name: str, endpoint: str, lines: Path) -> None:
        """Ask these lines in a batch. Its file's id follows from the evaluation's, so a repetition
        stores the same object."""
        named = hashlib.sha256(f"{evaluation.id}:{name}".encode()).hexdigest()
        content = await asyncio.to_thread(lines.read_bytes)
        now = utc_now()
        file = StoredFile(
            id=f"file-{named[:32]}",
            key_id=evaluation.key_id,
            purpose=FilePurpose.BATCH,
            filename=f"{evaluation.id}_{name}.jsonl",
            size_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            created_at=now,
            expires_at=now + COMPLETION_WINDOW,
        )
        await self._services.files.put(self._tenant_id, file, lines)
        failpoint("evaluations.stored")

        def add_batch(session: TenantSession) -> Changed[Evaluation]:
            asking = service.add_batch(session, evaluation.id, name, file, endpoint)
            details = {"batch": asking.batch_id, "asks": name}
            return Changed(asking, Event("evaluation.ask", evaluation.id, details))

        try:
            await self._control_plane.change(self._tenant_id, BY_SYSTEM, add_batch)
        except QuotaExceeded as exc:
            raise EvaluationFailed(exc.code, str(exc)) from exc
        failpoint("evaluations.asked")

    async def _succeed(self, scored: Scored) -> None:
        def succeed(session: TenantSession) -> Changed[Evaluation]:
            evaluation = service.succeed(
                session,
                self._evaluation_id,
                is_regression=scored.is_regression,
                slices=msgspec.to_builtins(scored.slices),
                cases=msgspec.to_builtins(scored.cases),
            )
            return Changed(evaluation, _ended(evaluation))

        await self._control_plane.change(self._tenant_id, BY_SYSTEM, succeed)
        failpoint("evaluations.ended")

    async def _fail(self, failure: EvaluationFailed) -> None:
        def fail(session: TenantSession) -> Changed[Evaluation]:
            evaluation = service.fail(
                session, self._evaluation_id, code=failure.code, message=str(failure)
            )
            return Changed(evaluation, _ended(evaluation))

        await self._control_plane.change(self._tenant_id, BY_SYSTEM, fail)


def _models(evaluation: Evaluation) -> Models:
    """The model names of its requests."""
    name = evaluation.adapter_name
    against = evaluation.base_name
    if evaluation.against_number is not None:
        against = f"{name}@{evaluation.against_number}"
    return Models(f"{name}@{evaluation.version_number}", against, evaluation.base_name)


def _first_error(path: Path) -> str:
    """The message of the first line of an error file."""
    with path.open("rb") as lines:
        line = msgspec.json.decode(lines.readline())
    error = line["error"] or line["response"]["body"]["error"]
    message: str = error["message"]
    return message


def _ended(evaluation: Evaluation) -> Event | None:
    """None: it was cancelled meanwhile."""
    if evaluation.state is EvaluationState.CANCELLED:
        return None
    details = {
        "state": evaluation.state,
        "is_regression": evaluation.is_regression,
        "error": evaluation.error_code,
    }
    return Event("evaluation.end", evaluation.id, details)
