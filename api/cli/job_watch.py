"""Follows a fine-tuning job in the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..client.api_client import ApiClient, api_path
from ..client.errors import ServerUnreachable
from ..client.polling import pauses
from .exit_codes import CommandFailed
from .output import note

ENDED = frozenset({"succeeded", "failed", "cancelled"})


def follow_job(client: ApiClient, job_id: str, *, is_quiet: bool) -> dict[str, Any]:
    """The job when it has succeeded, with a bar in a terminal and messages elsewhere. A server that
    is away for a while is waited for. Raises CommandFailed if the job fails or is cancelled."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    has_bar = console.is_terminal and not is_quiet
    with Progress(*columns, console=console, disable=not has_bar) as bars:
        task = bars.add_task(job_id, total=None, loss="")
        job = _wait(client, job_id, bars, task, says=not (has_bar or is_quiet))
    if job["status"] == "failed":
        raise CommandFailed(f"{job['error']['message']} ({job['error']['code']})")
    if job["status"] == "cancelled":
        raise CommandFailed("The job was cancelled.")
    if not is_quiet:
        note(f"{job['fine_tuned_model']} is ready: {job['trained_tokens']} tokens were trained.")
    return job


def _wait(
    client: ApiClient, job_id: str, bars: Progress, task: Any, *, says: bool
) -> dict[str, Any]:
    said = ""
    for pause in pauses():
        try:
            job: dict[str, Any] = client.get(api_path("fine_tuning", "jobs", job_id))
            loss = _loss(client, job_id) if job["status"] == "running" else ""
        except ServerUnreachable as exc:
            text = str(exc)
        else:
            if job["status"] in ENDED:
                return job
            state = _state(job)
            text = f"{job_id}: {state}, step {job['step']} of {job['num_steps']}"
            bars.update(
                task,
                description=f"{job_id} {state}",
                total=job["num_steps"] or None,
                completed=job["step"],
                loss=loss,
            )
        if says and text != said:
            note(text)
        said = text
        time.sleep(pause)
    raise AssertionError


def _state(job: Mapping[str, Any]) -> str:
    reason = job.get("pause_reason")  # not of a server of an earlier release
    return f"{job['status']} ({reason})" if reason else str(job["status"])


def _loss(client: ApiClient, job_id: str) -> str:
    """The training loss of the last step that has one."""
    events = client.get(api_path("fine_tuning", "jobs", job_id, "events"), limit=20)["data"]
    for event in events:
        if event["type"] == "metrics" and "train_loss" in event["data"]:
            return f"loss {event['data']['train_loss']:.4f}"
    return ""
