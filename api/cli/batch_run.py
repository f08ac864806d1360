"""Runs a batch to its end from the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..client.api_client import ApiClient, api_path
from ..client.downloads import write_file
from ..client.errors import ServerUnreachable
from ..client.polling import pauses
from .batch_job import BatchJob
from .exit_codes import CommandFailed, ExitCode
from .output import note
from .progress import TerminalProgress

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


def run_batch(
    client: ApiClient, job: BatchJob, answers: Path, errors: Path, *, is_quiet: bool
) -> dict[str, Any]:
    """The batch of a job when it has ended, with its results in these files; a file without lines
    is not there."""
    batch = _follow(client, job.batch_id(client), is_quiet=is_quiet)
    for kind, path in (("output_file_id", answers), ("error_file_id", errors)):
        path.unlink(missing_ok=True)
        if batch[kind] is not None:
            with client.download(api_path("files", batch[kind], "content")) as response:
                write_file(response, path, TerminalProgress(is_quiet=is_quiet))
    job.forget()
    return batch


def check_batch(batch: dict[str, Any], answers: Path, errors: Path) -> None:
    """Raises CommandFailed unless every line of the ended batch has an answer."""
    if batch["errors"] is not None:
        first = batch["errors"]["data"][0]
        place = "" if first["line"] is None else f"line {first['line']}: "
        raise CommandFailed(f"The file is invalid: {place}{first['message']}", ExitCode.USAGE)
    if batch["status"] != "completed":
        raise CommandFailed(f"The batch is {batch['status']}. Its results so far: {answers}")
    if num_failed := batch["request_counts"]["failed"]:
        raise CommandFailed(f"{num_failed} lines failed: {errors}")


def _follow(client: ApiClient, batch_id: str, *, is_quiet: bool) -> dict[str, Any]:
    """The batch when it has ended. A server that is away for a while is waited for."""
    shown = ""
    for pause in pauses():
        try:
            batch: dict[str, Any] = client.get(api_path("batches", batch_id))
        except ServerUnreachable as exc:
            said = str(exc)
        else:
            if batch["status"] in ENDED:
                return batch
            counts = batch["request_counts"]
            num_ended = counts["completed"] + counts["failed"]
            said = f"{batch_id}: {batch['status']}, {num_ended} of {counts['total']} lines"
        if said != shown and not is_quiet:
            note(said)
        shown = said
        time.sleep(pause)
    raise AssertionError
