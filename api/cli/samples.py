"""`loraplex samples`: samples of the requests to an adapter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...platform.samples.models import ExportFormat, SampleKind
from ..client.downloads import write_file
from .client import api_path, open_client
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite
from .output import AsJson, note, print_json, print_rows
from .progress import TerminalProgress
from .references import Name

app = typer.Typer(no_args_is_help=True, add_completion=False)
COLUMNS = [
    *("id", "version", "kind", "finish_reason", "prompt_tokens", "completion_tokens"),
    *("created_at", "expires_at"),
]
SAMPLING_COLUMNS = ["enabled", "percent", "days", "since", "changed_by", "samples", "max_days"]

SampleId = Annotated[str | None, typer.Argument(help="A sample's id, such as smp_1234.")]
Version = Annotated[
    int | None, typer.Option(min=1, max=999_999_999, help="Of this version.", show_default="all")
]


@app.command("on")
def turn_on(
    name: Name,
    percent: Annotated[
        float,
        typer.Option(callback=check_finite, help="Share of the requests, above 0, at most 100."),
    ],
    days: Annotated[int, typer.Option(min=1, help="How long a sample is kept.")],
    as_json: AsJson = False,
) -> None:
    """Keep samples of an adapter's requests, or change the share or the days."""
    body = {"percent": percent, "days": days}
    with open_client() as client:
        sampling = client.put(api_path("adapters", name, "sampling"), body)
    _print([sampling], SAMPLING_COLUMNS, sampling, as_json=as_json)


@app.command("off")
def turn_off(name: Name, as_json: AsJson = False) -> None:
    """Keep no more samples. Those that exist stay until they expire or are deleted."""
    with open_client() as client:
        client.delete(api_path("adapters", name, "sampling"))
        sampling = client.get(api_path("adapters", name, "sampling"))
    _print([sampling], SAMPLING_COLUMNS, sampling, as_json=as_json)


@app.command("list")
def list_(name: Name, version: Version = None, as_json: AsJson = False) -> None:
    """List an adapter's samples without prompts and answers, the newest first."""
    query = {} if version is None else {"version": version}
    with open_client() as client:
        samples = list(client.pages(api_path("adapters", name, "samples"), **query))
    _print(samples, COLUMNS, samples, as_json=as_json)


@app.command("show")
def show(name: Name, sample_id: SampleId = None, as_json: AsJson = False) -> None:
    """Show whether an adapter is sampled, or the prompt and answer of one sample."""
    with open_client() as client:
        if sample_id is None:
            sampling = client.get(api_path("adapters", name, "sampling"))
            _print([sampling], SAMPLING_COLUMNS, sampling, as_json=as_json)
        else:
            print_json(client.get(api_path("adapters", name, "samples", sample_id)))


@app.command("export")
def export(
    name: Name,
    form: Annotated[
        ExportFormat, typer.Option("--format", help="Training data or a golden set.")
    ] = ExportFormat.TRAINING,
    kind: Annotated[SampleKind, typer.Option(help="Chats or completions.")] = SampleKind.CHAT,
    version: Version = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest ones.")] = 10_000,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Download the file to this path.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a file of an adapter's samples, for loraplex tune or loraplex eval."""
    body = {"format": form, "kind": kind, "version": version, "limit": limit}
    with open_client() as client:
        file = client.post(api_path("adapters", name, "samples", "export"), body)
        if output is not None:
            with client.download(api_path("files", file["id"], "content")) as response:
                write_file(response, output, TerminalProgress(is_quiet=as_json))
    if as_json:
        print_json(file)
    else:
        typer.echo(file["id"])
        note(f"{file['filename']} has {file['bytes']} bytes.")


@app.command("delete")
def delete(
    name: Name,
    sample_id: SampleId = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete one sample, or all of an adapter; prints the number that was deleted."""
    if not yes:
        _confirm(f"all samples of {name}" if sample_id is None else f"the sample {sample_id}")
    with open_client() as client:
        if sample_id is None:
            receipt = client.delete(api_path("adapters", name, "samples"))
        else:
            client.delete(api_path("adapters", name, "samples", sample_id))
            receipt = {"adapter": name, "samples": 1, "sample": sample_id}
    if as_json:
        print_json(receipt)
    else:
        typer.echo(f"deleted {receipt['samples']}")


def _confirm(what: str) -> None:
    """Ask the person at the terminal. Raises CommandFailed unless the answer is yes."""
    if not sys.stdin.isatty():
        raise CommandFailed(f"Not confirmed: add --yes to delete {what}.", ExitCode.USAGE)
    if not typer.confirm(f"Delete {what} permanently?", err=True):
        raise CommandFailed("Nothing was deleted.", ExitCode.FAILED)


def _print(rows: list[Any], columns: list[str], whole: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(whole)
    else:
        print_rows(rows, columns)
