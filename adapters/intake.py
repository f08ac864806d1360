"""Parses a tenant's upload in a separate, limited process that ends afterwards.

`run_intake` starts `python -m loraplex.adapters.intake`, writes one JSON request to its standard
input and reads one JSON answer, a report or a rejection, from its standard output. The child
inherits no environment, no open files and no working directory, and confines itself before it reads
the adapter (see `confinement` for the guarantees). A child that exceeds a limit, or crashes twice,
rejects the adapter; the caller is not affected. A child that was killed from outside says nothing
about the adapter: it is run once more, then IntakeUnavailable is raised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from .added_tokens import added_tokens_of
from .child import start_child
from .classification import classification_of
from .confinement import ProcessLimits, confine
from .errors import AdapterRejected, IntakeUnavailable, StorageFull
from .examination import IntakeReport, IntakeWarning, examine
from .invocation import invocation_of
from .layout import layout_from_json
from .measuring import ModuleDelta

MAX_ANSWER_BYTES = 1 << 20
MAX_LOG_BYTES = 4096
_MEMORY_FACTOR = 4
"""At worst one matrix is the whole file, and is held as stored, widened and transposed."""
_OUTPUT_FACTOR = 4
"""A block of mixed element types is written as float32, rows of tied tokens twice."""
_OUTPUT_RESERVE_BYTES = 16 << 20
_CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS)
)
"""Signals that a process causes itself. Other signals come from outside: an operator, or the kernel
when memory runs out."""

_log = logging.getLogger(__name__)
_NO_ROOM = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """The limits of one examination."""

    max_file_bytes: int = 4 << 30
    """Size of the weights file."""
    memory_bytes: int = 1 << 30
    """Address space, on top of four times the weights file."""
    cpu_seconds: int = 60
    wall_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class IntakeRequest:
    """One adapter to examine; see `examine`. All paths are absolute."""

    config_path: str
    weights_path: str
    output_path: str
    layout_path: str
    """A file with `layout_to_json` of the base's layout."""
    serving_dtype: str
    declared_base_id: str | None = None
    base_model_name: str | None = None
    max_full_matrix_bytes: int = 0
    room_bytes: int | None = None
    """The free disk space; None if unknown."""
    limits: IntakeLimits = field(default_factory=IntakeLimits)


class _ChildDied(Exception):
    """The child ended without an answer; `log` is the start of its standard error."""

    def __init__(self, status: int, log: str) -> None:
        super().__init__(f"the examining process ended with status {status}")
        self.status = status
        self.log = log


def run_intake(request: IntakeRequest) -> IntakeReport:
    """Examine an adapter in a child process; blocks for at most twice `limits.wall_seconds`.

    The block is then at `output_path`. Otherwise no output is left. Raises AdapterRejected if the
    adapter is refused, IntakeUnavailable if this machine could not complete the examination, and
    StorageFull if its disk has no room for the block.
    """
    size = Path(request.weights_path).stat().st_size
    if size > request.limits.max_file_bytes:
        raise AdapterRejected(
            "file_too_large",
            f"the weights have {size} bytes; the most is {request.limits.max_file_bytes}",
        )
    try:
        return _parse_answer(_run_child_twice(request))
    except BaseException:
        _discard_output(request)
        raise


def _run_child_twice(request: IntakeRequest) -> bytes:
    """The answer of a child, or of the next one if the first dies."""
    try:
        return _run_child(request)
    except _ChildDied as death:
        _log.warning("intake_child_died", extra={"status": death.status, "log": death.log})
    _discard_output(request)
    try:
        return _run_child(request)
    except _ChildDied as death:
        raise _blame(death) from death


def _discard_output(request: IntakeRequest) -> None:
    Path(request.output_path).unlink(missing_ok=True)


def _blame(death: _ChildDied) -> AdapterRejected | IntakeUnavailable:
    """The error after a second death: two crashes on the same bytes are caused by them."""
    error = (
        AdapterRejected("intake_failed", str(death))
        if -death.status in _CRASHES
        else IntakeUnavailable()
    )
    error.add_note(f"{death}: {death.log}")  # for the operator's log, not for the tenant
    return error


def _run_child(request: IntakeRequest) -> bytes:
    """The child's answer. Raises _ChildDied, AdapterRejected past a limit, IntakeUnavailable."""
    with (
        tempfile.TemporaryFile() as question,
        tempfile.TemporaryFile() as answer,
        tempfile.TemporaryFile() as log,
    ):
        question.write(json.dumps(asdict(request)).encode())
        question.seek(0)
        try:
            child = start_child(__name__, stdin=question, stdout=answer, stderr=log)
        except OSError as exc:
            raise IntakeUnavailable from exc
        _wait(child, request.limits.wall_seconds)
        _check_exit(child.returncode, _read_start(log, MAX_LOG_BYTES))
        return _read_start(answer, MAX_ANSWER_BYTES)


def _wait(child: subprocess.Popen[bytes], wall_seconds: float) -> None:
    try:
        child.wait(wall_seconds)
    except subprocess.TimeoutExpired as exc:
        cpu_seconds = _kill(child)
        if cpu_seconds < wall_seconds / 2:  # it was prevented from running
            raise IntakeUnavailable from exc
        raise AdapterRejected("intake_limit", f"it took longer than {wall_seconds:g} s") from exc
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _kill(child: subprocess.Popen[bytes]) -> float:
    """End the child; the processor time that it used, in seconds."""
    child.kill()
    _, _, usage = os.wait4(child.pid, 0)
    return usage.ru_utime + usage.ru_stime


def _check_exit(status: int, log: bytes) -> None:
    if status == -signal.SIGXCPU:
        raise AdapterRejected("intake_limit", "it exceeded the limit on processor time")
    if status != 0:
        raise _ChildDied(status, log.decode(errors="replace"))


def _read_start(file: IO[bytes], max_bytes: int) -> bytes:
    file.seek(0)
    return file.read(max_bytes)


def _parse_answer(answer: bytes) -> IntakeReport:
    try:
        fields = json.loads(answer)
        rejection, report = fields["rejection"], fields["report"]
        if rejection is None:
            return _parse_report(report)
        if rejection["reason"] == StorageFull.code:
            raise StorageFull
        rejected = AdapterRejected(
            rejection["reason"], rejection["message"], pointer=rejection["pointer"]
        )
        if rejection["note"]:
            rejected.add_note(rejection["note"])  # for the operator's log, not for the tenant
    except (ValueError, KeyError, TypeError) as exc:
        raise AdapterRejected("intake_failed", "the examining process gave no answer") from exc
    raise rejected


def _parse_report(fields: dict[str, Any]) -> IntakeReport:
    return IntakeReport(
        **{
            **fields,
            "targets": tuple(fields["targets"]),
            "features": tuple(fields["features"]),
            "added_tokens": added_tokens_of(fields),
            "classification": classification_of(fields),
            "invocation_token_ids": invocation_of(fields),
            "largest_deltas": tuple(ModuleDelta(**delta) for delta in fields["largest_deltas"]),
            "warnings": tuple(IntakeWarning(**warning) for warning in fields["warnings"]),
        }
    )


# --- in the child -------------------------------------------------------------------------------


def main() -> None:
    """Answer the request on standard input; an exit without an answer is an internal error."""
    fields = json.load(sys.stdin)
    request = IntakeRequest(**{**fields, "limits": IntakeLimits(**fields["limits"])})
    output = Path(request.output_path)
    output.touch(0o600)
    read = [Path(path) for path in (request.config_path, request.weights_path, request.layout_path)]
    confine(_process_limits(request), read=read, write=[output])
    json.dump(_answer(request), sys.stdout)


def _process_limits(request: IntakeRequest) -> ProcessLimits:
    size = Path(request.weights_path).stat().st_size
    return ProcessLimits(
        memory_bytes=request.limits.memory_bytes + _MEMORY_FACTOR * size,
        cpu_seconds=request.limits.cpu_seconds,
        file_bytes=_max_output_bytes(request, size),
    )


def _max_output_bytes(request: IntakeRequest, size: int) -> int:
    most = _OUTPUT_RESERVE_BYTES + _OUTPUT_FACTOR * size
    return most if request.room_bytes is None else min(most, request.room_bytes)


def _answer(request: IntakeRequest) -> dict[str, object]:
    try:
        return {"report": asdict(examine_request(request)), "rejection": None}
    except AdapterRejected as exc:
        return _rejection(exc)
    except MemoryError:
        return _rejection(AdapterRejected("intake_limit", "it exceeded the limit on memory"))
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise
        return _rejection(_too_long(request, exc.errno))
    except Exception as exc:  # a defect of the examination; the upload is a tenant's
        error = AdapterRejected("intake_failed", f"the examination failed: {type(exc).__name__}")
        error.add_note(traceback.format_exc()[-MAX_LOG_BYTES:])
        return _rejection(error)


def _too_long(request: IntakeRequest, reason: int) -> AdapterRejected:
    """Why the block was not written to its end: its own limit, or the disk's."""
    if reason == errno.EFBIG and not _fills_the_room(request):
        return AdapterRejected("intake_limit", "the block exceeded its size limit")
    return AdapterRejected(StorageFull.code, str(StorageFull()))


def _fills_the_room(request: IntakeRequest) -> bool:
    written_bytes = Path(request.output_path).stat().st_size
    return request.room_bytes is not None and written_bytes >= request.room_bytes


def examine_request(request: IntakeRequest) -> IntakeReport:
    """The examination itself, in this process. Raises AdapterRejected."""
    return examine(
        Path(request.config_path),
        Path(request.weights_path),
        Path(request.output_path),
        layout=layout_from_json(Path(request.layout_path).read_text()),
        serving_dtype=request.serving_dtype,
        declared_base_id=request.declared_base_id,
        base_model_name=request.base_model_name,
        max_full_matrix_bytes=request.max_full_matrix_bytes,
    )


def _rejection(error: AdapterRejected) -> dict[str, object]:
    fields = {
        "reason": error.reason,
        "message": str(error),
        "pointer": error.pointer,
        "note": "".join(getattr(error, "__notes__", ())),
    }
    return {"report": None, "rejection": fields}


if __name__ == "__main__":
    main()
