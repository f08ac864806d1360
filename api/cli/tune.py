"""`loraplex tune`: trains an adapter from a file of examples."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from .client import open_client
from .job_watch import follow_job
from .output import AsJson, note, print_json

app = typer.Typer(add_completion=False)


@app.command()
def tune(
    file: Annotated[
        Path,
        typer.Argument(help="One example per line.", exists=True, dir_okay=False, readable=True),
    ],
    adapter: Annotated[str, typer.Argument(help="The adapter that gets a new version.")],
    validation: Annotated[
        Path | None,
        typer.Option(help="Examples for validation.", exists=True, dir_okay=False, readable=True),
    ] = None,
    method: Annotated[str, typer.Option(help="supervised or dpo.")] = "supervised",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the data.", show_default="3")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples in a step.", show_default="8")
    ] = None,
    learning_rate_multiplier: Annotated[
        float | None,
        typer.Option(min=0, help="Of 2e-4, or 2e-5 with dpo.", show_default="1"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of the adapter.", show_default="16")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the training.", show_default="random")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the progress until the job ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Upload examples and train an adapter from them.

    The job continues if the command is interrupted: `loraplex jobs watch` follows it again.
    """
    with open_client() as client:
        body: dict[str, Any] = {
            "model": client.get("/base")["id"],
            "training_file": client.post_file("/files", file, purpose="fine-tune")["id"],
            "suffix": adapter,
            "seed": seed,
            "method": {"type": method},
        }
        if validation is not None:
            uploaded = client.post_file("/files", validation, purpose="fine-tune")
            body["validation_file"] = uploaded["id"]
        hyperparameters = {
            "n_epochs": epochs,
            "batch_size": batch_size,
            "learning_rate_multiplier": learning_rate_multiplier,
        }
        if given := {name: value for name, value in hyperparameters.items() if value is not None}:
            body["method"][method] = {"hyperparameters": given}
        if rank is not None:
            body["lora"] = {"rank": rank}
        job = client.post("/fine_tuning/jobs", body, idempotency_key=uuid.uuid4().hex)
        note(f"Job {job['id']} was created.")
        if watch:
            job = follow_job(client, job["id"], is_quiet=as_json)
    if as_json:
        print_json(job)
