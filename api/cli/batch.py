"""`loraplex batch`: answers files of requests in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .batch_job import BatchJob
from .batch_run import check_batch, run_batch
from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .output import AsJson, note, print_json

app = typer.Typer(no_args_is_help=True, add_completion=False)


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
        batch = run_batch(client, job, answers, errors, is_quiet=as_json)
    if as_json:
        print_json(batch)
    elif batch["status"] == "completed":
        counts = batch["request_counts"]
        note(f"{counts['completed']} of {counts['total']} lines answered: {answers}")
    check_batch(batch, answers, errors)
