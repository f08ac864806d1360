"""`loraplex adapters import`: pushes the adapters of a list in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..client.api_client import ApiClient
from ..client.errors import ClientError
from ..client.local_adapter import read_adapter
from ..client.progress import Progress
from ..client.references import check_name
from ..client.sources.source import open_source
from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .lora_modules import LoraModule, parse_modules
from .output import AsJson, print_json, print_rows
from .progress import TerminalProgress
from .push import upload, wait

COLUMNS = ["name", "version", "state", "message"]
FAILED = "failed"


def import_(
    modules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|NAME=PATH|JSON]...",
            help="File with a list of adapters, or adapters as NAME=PATH or as JSON objects with "
            "name, path and base_model_name. A path may be any source of `push`.",
            show_default=False,
        ),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-modules", metavar="NAME=PATH", help="As the arguments; vLLM's own option."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Push all adapters of a list in the form of vLLM's --lora-modules. One that fails does not
    stop the others; the exit code is 1 then."""
    wanted = parse_modules([*(lora_modules or ()), *(modules or ())])
    if not wanted:
        raise CommandFailed("No adapters are given: add a file, or NAME=PATH.", ExitCode.USAGE)
    progress = TerminalProgress(is_quiet=as_json)
    with open_client() as client:
        served = _served_model(client, wanted)
        rows = [_push(client, module, served, progress) for module in wanted]
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, COLUMNS)
    num_failed = sum(row["state"] == FAILED for row in rows)
    if num_failed:
        raise CommandFailed(f"{num_failed} of {len(rows)} adapters were not imported.")


def _served_model(client: ApiClient, modules: Sequence[LoraModule]) -> str | None:
    """The base's name on the server; None if no entry names a base."""
    if all(module.base_model_name is None for module in modules):
        return None
    name: str = client.get("/base")["id"]
    return name


def _push(
    client: ApiClient, module: LoraModule, served: str | None, progress: Progress
) -> dict[str, Any]:
    """What became of one entry."""
    try:
        check_name(module.name)
        with open_source(module.source, progress) as folder:
            version = upload(
                client, read_adapter(folder), module.name, aliases=[], base_id=None,
                progress=progress,
            )  # fmt: skip
        version = wait(client, version)
    except ClientError as exc:
        return {"name": module.name, "version": None, "state": FAILED, "message": str(exc)}
    is_other = module.base_model_name not in (None, served)
    message = f"made for {module.base_model_name}; the server runs {served}" if is_other else None
    return {
        "name": module.name,
        "version": version["version"],
        "state": version["state"],
        "message": message,
    }
