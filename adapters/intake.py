"""Where a tenant's bytes are parsed: in a process of its own, with limits, that is thrown away.

`run_intake` starts `python -m loraplex.adapters.intake`, hands it one JSON request on standard
input and reads one JSON answer, a report or a rejection, from its standard output. The child
inherits no environment, no open files and no working directory, and confines itself before it
reads the adapter (see `confinement` for what is guaranteed). A child that crashes, stalls or
exceeds a limit is a rejection like any other; the caller is never harmed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from .confinement import ProcessLimits, confine
from .errors import AdapterRejected
from .examination import IntakeReport, IntakeWarning, examine
from .layout import layout_from_json
from .measuring import ModuleDelta

MAX_ANSWER_BYTES = 1 << 20
MAX_LOG_BYTES = 4096
_MEMORY_FACTOR = 4
"""At worst one matrix is the whole file, and is held as stored, widened and transposed."""
_OUTPUT_FACTOR = 4
"""A block of mixed element types is written as float32, rows of tied tokens twice."""
_OUTPUT_RESERVE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What one examination may use."""

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
    limits: IntakeLimits = field(default_factory=IntakeLimits)


def run_intake(request: IntakeRequest) -> IntakeReport:
    """Examine an adapter in a child process; blocks for at most `limits.wall_seconds`.

    The block is then at `output_path`. Raises AdapterRejected, and leaves no output, if the adapter
    is refused or its examination fails.
    """
    size = Path(request.weights_path).stat().st_size
    if size > request.limits.max_file_bytes:
        raise AdapterRejected(
            "file_too_large",
            f"the weights have {size} bytes; the most is {request.limits.max_file_bytes}",
        )
    try:
        return _parse_answer(_run_child(request))
    except AdapterRejected:
        Path(request.output_path).unlink(missing_ok=True)
        raise


def _run_child(request: IntakeRequest) -> bytes:
    """The child's answer. Raises AdapterRejected if it did not end in order and in time."""
    with (
        tempfile.TemporaryDirectory(prefix="loraplex-intake-") as directory,
        tempfile.TemporaryFile() as question,
        tempfile.TemporaryFile() as answer,
        tempfile.TemporaryFile() as log,
    ):
        question.write(json.dumps(asdict(request)).encode())
        question.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=question,
            stdout=answer,
            stderr=log,
            cwd=directory,
            env=_environment(),
            start_new_session=True,
        )
        _wait(child, request.limits.wall_seconds)
        _check_exit(child.returncode, _read_start(log, MAX_LOG_BYTES))
        return _read_start(answer, MAX_ANSWER_BYTES)


def _environment() -> dict[str, str]:
    """Where to import from, and one thread for numpy; nothing of the server's own environment."""
    return {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _wait(child: subprocess.Popen[bytes], wall_seconds: float) -> None:
    try:
        child.wait(wall_seconds)
    except subprocess.TimeoutExpired as exc:
        raise AdapterRejected("intake_limit", f"it took longer than {wall_seconds:g} s") from exc
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _check_exit(status: int, log: bytes) -> None:
    if status == 0:
        return
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        raise AdapterRejected("intake_limit", "it exceeded the limit on processor time or memory")
    error = AdapterRejected("intake_failed", f"the examining process ended with status {status}")
    error.add_note(log.decode(errors="replace"))  # for the operator's log, not for the tenant
    raise error


def _read_start(file: IO[bytes], max_bytes: int) -> bytes:
    file.seek(0)
    return file.read(max_bytes)


def _parse_answer(answer: bytes) -> IntakeReport:
    try:
        fields = json.loads(answer)
        rejection, report = fields["rejection"], fields["report"]
        if rejection is None:
            return _parse_report(report)
        rejected = AdapterRejected(
            rejection["reason"], rejection["message"], pointer=rejection["pointer"]
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise AdapterRejected("intake_failed", "the examining process gave no answer") from exc
    raise rejected


def _parse_report(fields: dict[str, Any]) -> IntakeReport:
    return IntakeReport(
        **{
            **fields,
            "targets": tuple(fields["targets"]),
            "features": tuple(fields["features"]),
            "largest_deltas": tuple(ModuleDelta(**delta) for delta in fields["largest_deltas"]),
            "warnings": tuple(IntakeWarning(**warning) for warning in fields["warnings"]),
        }
    )


# --- in the child -------------------------------------------------------------------------------


def main() -> None:
    """Answer the request on standard input; ends abnormally only on a fault of our own."""
    fields = json.load(sys.stdin)
    request = IntakeRequest(**{**fields, "limits": IntakeLimits(**fields["limits"])})
    confine(_process_limits(request))
    json.dump(_answer(request), sys.stdout)


def _process_limits(request: IntakeRequest) -> ProcessLimits:
    size = Path(request.weights_path).stat().st_size
    return ProcessLimits(
        memory_bytes=request.limits.memory_bytes + _MEMORY_FACTOR * size,
        cpu_seconds=request.limits.cpu_seconds,
        file_bytes=_OUTPUT_RESERVE_BYTES + _OUTPUT_FACTOR * size,
    )


def _answer(request: IntakeRequest) -> dict[str, object]:
    try:
        return {"report": asdict(_examine(request)), "rejection": None}
    except AdapterRejected as exc:
        return _rejection(exc)
    except MemoryError:
        return _rejection(AdapterRejected("intake_limit", "it exceeded the limit on memory"))
    except OSError as exc:
        if exc.errno != errno.EFBIG:
            raise
        return _rejection(AdapterRejected("intake_limit", "the block exceeded its size limit"))


def _examine(request: IntakeRequest) -> IntakeReport:
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
    fields = {"reason": error.reason, "message": str(error), "pointer": error.pointer}
    return {"report": None, "rejection": fields}


if __name__ == "__main__":
    main()
