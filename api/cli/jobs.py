"""`loraplex jobs`: lists, shows and controls fine-tuning jobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..client.tenant_export import openai_entries
from .client import api_path, open_client
from .job_watch import follow_job
from .output import AsJson, note, print_json, print_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)

COLUMNS = [
    *("id", "adapter", "status", "pause_reason", "step", "num_steps"),
    *("trained_tokens", "fine_tuned_model"),
]
EVENT_COLUMNS = ["created_at", "level", "message"]

JobId = Annotated[str, typer.Argument(help="The job's id, such as ftjob-1234.")]


@app.callback()
def _of_jobs() -> None:
    """List, show, watch, pause and cancel fine-tuning jobs."""


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the tenant's jobs, the newest first."""
    with open_client() as client:
        jobs = list(openai_entries(client, "/fine_tuning/jobs"))
    _print(jobs, jobs, as_json=as_json)


@app.command("show")
def show(job_id: JobId, as_json: AsJson = False) -> None:
    """Show a job and its last events."""
    with open_client() as client:
        job = client.get(api_path("fine_tuning", "jobs", job_id))
        events = client.get(api_path("fine_tuning", "jobs", job_id, "events"), limit=10)["data"]
    if as_json:
        print_json({**job, "events": events})
        return
    print_rows([job], COLUMNS)
    if job["error"] is not None:
        note(f"{job['error']['message']} ({job['error']['code']})")
    print_rows(events[::-1], EVENT_COLUMNS)


@app.command("watch")
def watch(job_id: JobId, as_json: AsJson = False) -> None:
    """Show a job's progress until it ends."""
    with open_client() as client:
        job = follow_job(client, job_id, is_quiet=as_json)
    if as_json:
        print_json(job)


@app.command("cancel")
def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """End a job without a result."""
    _change(job_id, "cancel", as_json=as_json)


@app.command("pause")
def pause(job_id: JobId, as_json: AsJson = False) -> None:
    """Pause a job; its checkpoint is kept."""
    _change(job_id, "pause", as_json=as_json)


@app.command("resume")
def resume(job_id: JobId, as_json: AsJson = False) -> None:
    """Let a paused job go on when its turn comes."""
    _change(job_id, "resume", as_json=as_json)


def _change(job_id: str, action: str, *, as_json: bool) -> None:
    with open_client() as client:
        job = client.post(api_path("fine_tuning", "jobs", job_id, action))
    _print([job], job, as_json=as_json)


def _print(jobs: list[dict[str, Any]], data: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        print_rows(jobs, COLUMNS)
