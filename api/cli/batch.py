"""`loraplex batch`: answers files of requests in the background."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..client.api_client import ApiClient, api_path
from ..client.downloads import write_file
from ..client.errors import ServerUnreachable
from ..client.polling import pauses
from .batch_job import BatchJob
from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json
from .progress import TerminalProgress

app = typer.Typer(no_args_is_help=True, add_completion=False)

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@app.callback()
def _of_batches() -> None:
    """Answer files of requests in the background."""


@app.command("run")
def run(
    file: Annotated[
        Path,
        typer.Argument(help="One request per line.", exists=True, dir_okay=False, readable=True),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="For the answers; by default FILE.out.jsonl."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a file of requests, wait for the batch, and download the results.

    Errors go to a file beside the output. After an interruption, the same command continues.
    """
    answers = output or file.with_name(f"{file.stem}.out.jsonl")
    errors = answers.with_name(f"{answers.stem}.errors{answers.suffix}")
    job = BatchJob.open(file, answers)
    if not force and not job.is_begun:
        for path in (answers, errors):
            if path.exists():
                raise CommandFailed(
                    f"{path} exists. Use another --output, or --force to overwrite it.",
                    ExitCode.CONFLICT,
                )
    with open_client() as client:
        batch = _follow(client, job.batch_id(client), is_quiet=as_json)
        for kind, path in (("output_file_id", answers), ("error_file_id", errors)):
            path.unlink(missing_ok=True)
            if batch[kind] is not None:
                with client.download(api_path("files", batch[kind], "content")) as response:
                    write_file(response, path, TerminalProgress(is_quiet=as_json))
    job.forget()
    _report(batch, answers, errors, as_json=as_json)


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


def _report(batch: dict[str, Any], answers: Path, errors: Path, *, as_json: bool) -> None:
    counts = batch["request_counts"]
    if as_json:
        print_json(batch)
    elif batch["status"] == "completed":
        note(f"{counts['completed']} of {counts['total']} lines answered: {answers}")
    if batch["errors"] is not None:
        first = batch["errors"]["data"][0]
        place = "" if first["line"] is None else f"line {first['line']}: "
        raise CommandFailed(f"The file is invalid: {place}{first['message']}", ExitCode.USAGE)
    if batch["status"] != "completed":
        raise CommandFailed(f"The batch is {batch['status']}. Its results so far: {answers}")
    if counts["failed"]:
        raise CommandFailed(f"{counts['failed']} lines failed: {errors}")
